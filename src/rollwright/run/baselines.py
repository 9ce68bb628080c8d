"""What chance and perfect play reach on the same levels: the two figures beside every result."""

from dataclasses import dataclass

from rollwright.agents import EpisodeFailure
from rollwright.policies.base import Playable, Policy
from rollwright.policies.players import OraclePlayer, RandomPlayer
from rollwright.rollout.episode import Episode, level_seed, new_session, play
from rollwright.run.assembly import SettingsTable, make_env

LEVELS = 64
"""Levels for each tag: a standard error of at most 6 points, for a fraction of a second."""


@dataclass(frozen=True)
class Baseline:
    """Success rates on one tag; `None` where the environment does not list actions or know solutions."""

    levels: int
    random: float | None
    oracle: float | None


async def baseline(
    tag: str, mode: str, run_seed: int, table: SettingsTable, levels: int = LEVELS
) -> Baseline:
    """Plays levels of this run's own seed with the random player and the oracle."""
    return Baseline(
        levels=levels,
        random=await _success(tag, mode, run_seed, table, RandomPlayer(), levels),
        oracle=await _success(tag, mode, run_seed, table, OraclePlayer(), levels),
    )


async def _success(
    tag: str, mode: str, run_seed: int, table: SettingsTable, player: Policy, levels: int
) -> float | None:
    solved = 0
    for index in range(levels):
        episode = Episode(
            tag=tag,
            seed=level_seed(run_seed, mode, index),
            mode="train",
            group_id=f"baseline-g{index}",
            group=index,
            member=0,
            run_seed=run_seed,
        )
        settings = table(episode)
        env = make_env(settings)
        try:
            if not isinstance(env, Playable):
                return None
            session = new_session(
                episode, player, settings, env, rollout_id=f"baseline-{index}", attempt_id="baseline"
            )
            trajectory = await play(session, env, settings, player)
        except EpisodeFailure:
            return None
        finally:
            await env.close()
        if trajectory.success is None:
            return None
        solved += trajectory.success
    return solved / levels
