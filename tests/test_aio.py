"""Waiting for the end of a task."""

import asyncio

import pytest

from rollwright.aio import ending


@pytest.mark.parametrize("outcome", ["a result", "an error", "a cancellation"])
async def test_the_end_of_a_task_is_noticed_whatever_its_outcome(outcome: str) -> None:
    going = asyncio.Event()

    async def work() -> None:
        await going.wait()
        if outcome == "an error":
            raise ValueError

    task = asyncio.create_task(work())
    noticed = ending(task)
    await asyncio.sleep(0)
    assert not noticed.done()
    task.cancel() if outcome == "a cancellation" else going.set()
    await noticed
    assert task.done()
    if outcome == "an error":
        assert isinstance(task.exception(), ValueError)
    await ending(task)  # of a task that has ended long ago, too


async def test_who_stops_waiting_for_a_tasks_end_leaves_the_task_alone() -> None:
    going = asyncio.Event()
    task = asyncio.create_task(going.wait())
    waiting = asyncio.ensure_future(ending(task))
    waiting.cancel()
    going.set()
    assert await task
    assert waiting.cancelled()
