"""A run that somebody closes tells those who wait for it, and one that cannot go on does not leave them waiting."""

import asyncio
from typing import Any

import pytest

from rollwright.config import build
from rollwright.engines.base import Generation, Prompt, Sampling
from rollwright.errors import RollwrightError, RunClosed
from rollwright.rollout import Fate
from rollwright.run.run import Run
from rollwright.simulation.players import RandomPlayer

CONFIG = {
    "train_env_manager": {"num_env_groups": 1, "group_size": 2, "tags": ["FrozenLake"]},
    "val_env_manager": {"num_env_groups": 2, "tags": ["FrozenLake"]},
}
PATIENCE = 60.0


class Silent(RandomPlayer):
    """Never answers."""

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        await asyncio.sleep(10**6)
        raise AssertionError


@pytest.mark.parametrize("call", ["get_batch", "evaluate"])
@pytest.mark.parametrize("waiting", [1, 3])
async def test_closing_a_run_tells_whoever_waits_for_a_batch_that_it_was_closed(
    call: str, waiting: int
) -> None:
    run = Run(build(CONFIG), policy=Silent())
    await run.__aenter__()
    calls = [asyncio.create_task(getattr(run, call)()) for _ in range(waiting)]
    while run.activity.claimed < 2:
        await asyncio.sleep(0.001)
    await run.__aexit__(None, None, None)
    async with asyncio.timeout(PATIENCE):
        for each in calls:
            with pytest.raises(RunClosed, match="was closed while a batch was waited for"):
                await each


async def test_each_episode_is_stopped_once_and_everything_is_accounted_for() -> None:
    """A thousand episodes in flight end with the run: the store need not tell each of them first."""
    manager = {"num_env_groups": 100, "group_size": 10, "tags": ["FrozenLake"]}
    sizes = {"max_inflight": 1000, "rollout_batch_size": 1000, "async_generation_ratio": 1}
    run = Run(build({**sizes, "train_env_manager": manager}), policy=Silent())
    await run.__aenter__()
    while run.activity.claimed < 1000:
        await asyncio.sleep(0.001)
    await run.__aexit__(None, None, None)
    assert (run.activity.withdrawn, run.activity.refused, run.activity.inflight) == (0, 0, 0)
    assert run.ledger.counts[Fate.RUNNING] == 0
    assert run.ledger.counts[Fate.CANCELLED] == run.ledger.opened >= 1000


async def test_a_caller_that_was_cancelled_is_cancelled() -> None:
    async with Run(build(CONFIG), policy=Silent()) as run:
        waiting = asyncio.create_task(run.get_batch())
        while run.activity.claimed < 2:
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_a_closed_run_gives_no_batches_and_one_that_has_not_begun_says_so() -> None:
    run = Run(build(CONFIG), policy=RandomPlayer())
    with pytest.raises(RollwrightError, match="has not started"):
        await run.get_batch()
    async with run:
        await run.get_batch()
    for call in (run.get_batch, run.evaluate):
        with pytest.raises(RunClosed, match="the run is closed"):
            await call()


async def test_code_that_cancels_every_task_ends_the_run_with_an_error_that_says_so() -> None:
    """It cancels the caller too, who is told nothing but that; whoever asks next hears what happened."""

    class Cancelling(RandomPlayer):
        async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
            for each in asyncio.all_tasks() - {test}:
                each.cancel()
            await asyncio.sleep(10**6)
            raise AssertionError

    test: Any = asyncio.current_task()
    async with asyncio.timeout(PATIENCE), Run(build(CONFIG), policy=Cancelling()) as run:
        with pytest.raises(RollwrightError, match="cancel tasks that are not its own"):
            await run.get_batch()
        with pytest.raises(RollwrightError, match="cancel tasks that are not its own"):
            await run.get_batch()


async def test_a_policy_that_raises_a_cancellation_when_it_is_closed_cancels_nobody() -> None:
    class Bad(RandomPlayer):
        async def close(self) -> None:
            raise asyncio.CancelledError

    with pytest.raises(RollwrightError, match="policy: raised CancelledError when it was closed"):
        async with Run(build(CONFIG), policy=Bad()) as run:
            await run.get_batch()
