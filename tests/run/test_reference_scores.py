"""The figures beside a result are the same whichever rollouts were finished first."""

import asyncio

import pytest

import rollwright.envs.registry as registry
from rollwright.config import build
from rollwright.envs.base import Step
from rollwright.envs.games.frozen_lake import FrozenLake
from rollwright.envs.registry import EnvSpec, register
from rollwright.run.build import SettingsTable
from rollwright.run.reference_scores import EPISODES, baseline
from rollwright.run.statistics import TagStatistics
from rollwright.trajectory import Trajectory

SEEDS = [(number * 7919) % 100_003 for number in range(3 * EPISODES)]


@pytest.mark.parametrize("count", [10, EPISODES, 3 * EPISODES])
async def test_the_levels_of_a_baseline_do_not_depend_on_the_order_of_finishing(count: int) -> None:
    table = SettingsTable(build({"val_env_manager": {"num_env_groups": 4, "tags": ["FrozenLake"]}}))
    one, other = SEEDS[:count], SEEDS[:count][::-1]
    figures = [await baseline("FrozenLake", seeds, 0, table) for seeds in (one, other)]
    assert figures[0] == figures[1]
    assert figures[0].levels == min(count, EPISODES)
    assert figures[0].oracle == 1.0


def test_statistics_of_very_many_levels_keep_those_that_a_baseline_plays() -> None:
    kept = []
    for order in (SEEDS, SEEDS[::-1]):
        statistics = TagStatistics()
        for seed in order:
            statistics.add(trajectory(seed))
        assert len(statistics.levels) <= 2 * EPISODES
        kept.append(sorted(statistics.levels)[:EPISODES])
    assert kept[0] == kept[1] == sorted(SEEDS)[:EPISODES]


def trajectory(seed: int) -> Trajectory:
    return Trajectory(f"ro-{seed}", "at-1", "g", "FrozenLake", seed)


class Cancelling(FrozenLake):
    """Cancels the task that it runs in."""

    async def step(self, answer: str) -> Step:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return await super().step(answer)


async def test_an_environment_that_cancels_its_task_has_no_baseline_and_ends_nothing_else() -> None:
    register(EnvSpec("Cancelling", "for a test", Cancelling))
    try:
        table = SettingsTable(build({"val_env_manager": {"num_env_groups": 4, "tags": ["Cancelling"]}}))
        found = await baseline("Cancelling", SEEDS[:4], 0, table)
    finally:
        registry.ENVIRONMENTS.unregister("Cancelling")
    assert (found.random, found.oracle) == (None, None)
