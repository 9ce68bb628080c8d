"""Success of random and perfect play on the same levels: the two reference scores beside every result."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from rollwright.agents import EpisodeFailure, bounded
from rollwright.config import RunConfig
from rollwright.engines.base import Playable, Policy
from rollwright.envs.base import EnvironmentFailure
from rollwright.rollout.episode import CHAIN, Episode, new_session, play_episode
from rollwright.run.build import SettingsTable, make_env
from rollwright.simulation.players import OraclePlayer, RandomPlayer
from rollwright.trajectory import Boundary

EPISODES = 64
"""Random episodes for each tag: a standard error of at most 6 points, for a fraction of a second."""


@dataclass(frozen=True)
class Baseline:
    """Success rates on one tag; `None` if the environment lists no actions or knows no solutions."""

    levels: int
    random: float | None
    oracle: float | None


async def baseline(tag: str, seeds: Sequence[int], run_seed: int, table: SettingsTable) -> Baseline:
    """Play these levels once with the oracle, and at random about `EPISODES` times.

    Of more than `EPISODES` levels, those with the smallest seeds are played, so that the choice does not depend on the
    order in which episodes finished.
    """
    levels = sorted(set(seeds))[:EPISODES]
    often = levels * max(1, EPISODES // max(len(levels), 1))
    return Baseline(
        levels=len(levels),
        random=await _success(tag, often, run_seed, table, RandomPlayer()),
        oracle=await _success(tag, levels, run_seed, table, OraclePlayer()),
    )


async def validation_baselines(config: RunConfig) -> dict[str, Baseline]:
    """Baselines by tag on the validation levels; empty without validation."""
    manager = config.val_env_manager
    levels: dict[str, list[int]] = {}
    table = SettingsTable(config)
    slot_tags = manager.slot_tags() if manager is not None else []
    level_of = table.level_of("val", slot_tags)
    for index, tag in enumerate(slot_tags):
        levels.setdefault(tag, []).append(level_of(tag, index))
    return {tag: await baseline(tag, seeds, config.seed, table) for tag, seeds in levels.items()}


async def _success(
    tag: str, seeds: Sequence[int], run_seed: int, table: SettingsTable, player: Policy
) -> float | None:
    solved = 0
    for member, seed in enumerate(seeds):
        episode = Episode(
            tag=tag, seed=seed, mode="train", group_id="baseline", group=0, member=member, run_seed=run_seed
        )
        # A separate task, because an environment's code may cancel the task that it runs in.
        playing = asyncio.create_task(_is_solved(episode, table, player))
        try:
            await asyncio.wait({playing})
        finally:
            playing.cancel()
        success = None if playing.cancelled() else playing.result()
        if success is None:
            return None
        solved += success
    return solved / len(seeds) if seeds else None


async def _is_solved(episode: Episode, table: SettingsTable, player: Policy) -> bool | None:
    """`None` if the environment reports no success, cannot be played by this player, or failed."""
    settings = replace(table(episode), strategy=CHAIN)
    # A player writes bytes, so a limit for a model's tokens would truncate its answers.
    whole = msgspec.structs.replace(settings.sampling, max_tokens=settings.sequence_length)
    settings = replace(settings, sampling=whole)
    name = f"baseline-m{episode.member}"
    try:
        env = make_env(settings)
        try:
            if not isinstance(env, Playable):
                return None
            session = new_session(episode, player, settings, env, rollout_id=name, attempt_id="baseline")
            trajectory = await play_episode(session, env, settings, player, partial(make_env, settings))
            return trajectory.success
        finally:
            await bounded(env.close(), settings.limits.step_timeout, Boundary.ENVIRONMENT, 0)
    except (EpisodeFailure, EnvironmentFailure):
        return None
