"""Copies by replay: an environment that comes another way in anything that is compared is not used."""

import asyncio
from typing import Any

import pytest

from rollwright.config import build
from rollwright.envs.base import Env, Step
from rollwright.rollout.episode import Episode
from rollwright.rollout.tree import EnvCopies, ForkMode
from rollwright.run.build import SettingsTable, make_env
from rollwright.trajectory import Outcome, Trajectory, Turn

CONFIG = build({"train_env_manager": {"num_env_groups": 1, "tags": ["FrozenLake"]}})
EPISODE = Episode("FrozenLake", seed=5, mode="train", group_id="g", group=0, member=0, run_seed=1)
NO_ACTION = "I do not know."
"""It moves nobody, so the episode goes on."""


class Other:
    """Answers as the environment does, but for one part of it."""

    def __init__(self, env: Env, part: str, value: Any) -> None:
        self._env = env
        self._change = {part: value}
        self.reset, self.close = env.reset, env.close

    async def step(self, answer: str) -> Step:
        return (await self._env.step(answer))._replace(**self._change)


async def copied(part: str | None, value: Any) -> tuple[int, int]:
    """Environments that a question behind one turn gets for two answers, and how many came another way."""
    settings = SettingsTable(CONFIG)(EPISODE)
    env = make_env(settings)
    first = await env.reset(EPISODE.seed)
    step = await env.step(NO_ACTION)
    assert not step.terminated
    assert not step.truncated
    turn = Turn(0, None, None, text=NO_ACTION, outcome=Outcome(step.observation, step.reward))
    played = Trajectory(
        "r", "a", "g", "FrozenLake", EPISODE.seed, observation=first.observation, turns=[turn]
    )

    def another() -> Any:
        return make_env(settings) if part is None else Other(make_env(settings), part, value)

    copies = EnvCopies(ForkMode.REPLAY, another, step_timeout=60.0)
    found = await copies.make(env, played, played.turns, 2)
    await copies.close()
    assert copies.replayed_steps == 1
    return len(found), copies.mismatches


def test_a_replay_that_comes_the_same_way_is_used() -> None:
    assert asyncio.run(copied(None, None)) == (2, 0)


@pytest.mark.parametrize(
    ("part", "value"),
    [("observation", "another lake"), ("reward", 0.5), ("terminated", True), ("truncated", True)],
)
def test_a_replay_that_differs_in_anything_is_thrown_away_and_counted(part: str, value: Any) -> None:
    assert asyncio.run(copied(part, value)) == (1, 1)
