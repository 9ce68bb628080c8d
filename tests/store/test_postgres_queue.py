"""Calls that wait for PostgreSQL are taken together, by one writer at a time."""

import asyncio
from typing import Any, cast

from rollwright.store.sql.driver import Job
from rollwright.store.sql.postgres_link import MAX_BATCH, CallQueue

Taken = list[tuple[str, int]]


def put(queue: CallQueue, count: int) -> None:
    for _ in range(count):
        queue.put(cast(Job[Any], object()))


async def write(name: str, queue: CallQueue, taken: Taken, pause: float = 0.0) -> None:
    while batch := await queue.take():
        taken.append((name, len(batch)))
        await asyncio.sleep(pause)


async def test_calls_of_one_moment_go_to_the_writer_that_was_busy_last() -> None:
    queue, taken = CallQueue(), cast(Taken, [])
    writers = [asyncio.create_task(write(name, queue, taken)) for name in ("first", "second")]
    await asyncio.sleep(0)
    for _ in range(3):
        put(queue, 4)
        await asyncio.sleep(0.01)
    queue.end()
    await asyncio.gather(*writers)
    assert taken == [("second", 4)] * 3


async def test_more_calls_than_one_batch_are_taken_by_another_writer_at_once() -> None:
    queue, taken = CallQueue(), cast(Taken, [])
    writers = [asyncio.create_task(write(name, queue, taken, 0.05)) for name in ("first", "second")]
    await asyncio.sleep(0)
    put(queue, MAX_BATCH + 3)
    await asyncio.sleep(0.01)
    assert taken == [("second", MAX_BATCH), ("first", 3)]
    put(queue, 1)
    queue.end()
    await asyncio.gather(*writers)
    assert sum(count for _, count in taken) == MAX_BATCH + 4


async def test_calls_that_arrive_while_all_are_busy_are_taken_by_the_first_to_finish() -> None:
    queue, taken = CallQueue(), cast(Taken, [])
    writer = asyncio.create_task(write("only", queue, taken, 0.01))
    await asyncio.sleep(0)
    put(queue, 2)
    await asyncio.sleep(0.005)
    put(queue, 5)
    await asyncio.sleep(0.02)
    assert taken == [("only", 2), ("only", 5)]
    queue.end()
    await writer
