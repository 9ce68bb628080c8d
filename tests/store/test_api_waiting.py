"""Waiting calls wake at once, and leases end in a store that nobody calls: over every backend."""

import asyncio

import pytest

from rollwright.store.api import Store
from rollwright.store.errors import NotFound
from rollwright.store.records import AttemptStatus, RolloutConfig, RolloutStatus

LONG = 30.0
"""Far longer than the test may take: whoever waits so long was not woken."""
SHORT_LEASE = RolloutConfig(unresponsive_seconds=0.1)


async def test_a_waiting_dequeue_is_served_when_work_comes(ticking: Store) -> None:
    waiting = asyncio.create_task(ticking.dequeue_rollout("worker-0", timeout=LONG))
    await asyncio.sleep(0.05)
    await ticking.enqueue_rollout(None, rollout_id="ro-1")
    async with asyncio.timeout(LONG / 3):
        claimed = await waiting
    assert claimed is not None
    assert claimed.rollout_id == "ro-1"


async def test_waiting_workers_are_served_in_the_order_they_asked(ticking: Store) -> None:
    waiting = []
    for number in range(4):
        waiting.append(asyncio.create_task(ticking.dequeue_rollout(f"worker-{number}", timeout=LONG)))
        await asyncio.sleep(0.05)
    for number in range(4):
        await ticking.enqueue_rollout(None, rollout_id=f"ro-{number}")
    async with asyncio.timeout(LONG / 3):
        claimed = await asyncio.gather(*waiting)
    assert [each.rollout_id for each in claimed if each] == [f"ro-{number}" for number in range(4)]


async def test_a_waiting_dequeue_gives_up_when_its_time_is_up(ticking: Store) -> None:
    assert await ticking.dequeue_many_rollouts(2, "worker-0", timeout=0.05) == []
    await ticking.enqueue_rollout(None)
    assert await ticking.dequeue_rollout("worker-1") is not None


async def test_a_cancelled_dequeue_takes_nothing_with_it(ticking: Store) -> None:
    for delay in (0.0, 0.001, 0.003, 0.01):
        waiting = asyncio.create_task(ticking.dequeue_rollout("worker-0", timeout=LONG))
        await asyncio.sleep(0.05)
        await ticking.enqueue_rollout(None)
        await asyncio.sleep(delay)
        waiting.cancel()
        [result] = await asyncio.gather(waiting, return_exceptions=True)
        if isinstance(result, BaseException):
            async with asyncio.timeout(LONG / 3):
                assert await ticking.dequeue_rollout("worker-1", timeout=LONG) is not None


async def test_a_lease_ends_in_a_store_that_nobody_calls(ticking: Store) -> None:
    await ticking.enqueue_rollout(None, rollout_id="ro-1", config=SHORT_LEASE)
    first = await ticking.dequeue_rollout("worker-0")
    assert first is not None
    async with asyncio.timeout(LONG / 3):
        again = await ticking.dequeue_rollout("worker-1", timeout=LONG)
    assert again is not None
    assert again.attempt.sequence_id == 2
    attempts = await ticking.query_attempts("ro-1")
    assert attempts[0].status is AttemptStatus.UNRESPONSIVE
    lease, ended = attempts[0].lease_expires, attempts[0].end_time
    assert lease is not None
    assert ended is not None
    assert ended >= lease


async def test_the_end_of_a_rollout_by_its_lease_wakes_who_waits_for_it(ticking: Store) -> None:
    config = RolloutConfig(timeout_seconds=0.1, max_attempts=1)
    await ticking.enqueue_rollout(None, rollout_id="ro-1", config=config)
    await ticking.dequeue_rollout("worker-0")
    async with asyncio.timeout(LONG / 3):
        [rollout] = await ticking.wait_for_rollouts(["ro-1"])
        [pair] = await ticking.wait_for_cancellations("worker-0", timeout=LONG)
    assert rollout.status is RolloutStatus.FAILED
    assert pair[0] == "ro-1"


async def test_completions_wake_their_reader(ticking: Store) -> None:
    await ticking.enqueue_rollout(None, rollout_id="ro-1")
    claimed = await ticking.dequeue_rollout("worker-0")
    assert claimed is not None
    reading = asyncio.create_task(ticking.read_completions(timeout=LONG))
    await asyncio.sleep(0.05)
    await ticking.update_attempt("ro-1", claimed.attempt.attempt_id, status="succeeded")
    async with asyncio.timeout(LONG / 3):
        [completion] = await reading
    assert completion.rollout_id == "ro-1"
    assert await ticking.read_completions(completion.cursor, timeout=0.05) == []


async def test_waiting_for_rollouts_ends_when_all_are_final(ticking: Store) -> None:
    for name in ("ro-1", "ro-2", "ro-3"):
        await ticking.enqueue_rollout(None, rollout_id=name)
    claimed = await ticking.dequeue_many_rollouts(2, "worker-0")
    waiting = asyncio.create_task(ticking.wait_for_rollouts(["ro-3", "ro-1", "ro-2", "ro-1"], timeout=LONG))
    behind = asyncio.create_task(ticking.wait_for_rollouts(["ro-1", "ro-2"], timeout=LONG))
    await asyncio.sleep(0.05)
    for each in claimed:
        await ticking.update_attempt(each.rollout_id, each.attempt.attempt_id, status="succeeded")
    assert [str(each.status) for each in await behind] == ["succeeded"] * 2
    assert not waiting.done(), "the third has not ended"
    await ticking.cancel_rollouts(["ro-3"], "enough")
    async with asyncio.timeout(LONG / 3):
        rollouts = await waiting
    assert [each.rollout_id for each in rollouts] == ["ro-3", "ro-1", "ro-2"]


async def test_waiting_for_rollouts_returns_what_is_final_when_time_is_up(ticking: Store) -> None:
    for name in ("ro-1", "ro-2"):
        await ticking.enqueue_rollout(None, rollout_id=name)
    await ticking.cancel_rollouts(["ro-1"], "enough")
    assert [r.rollout_id for r in await ticking.wait_for_rollouts(["ro-1", "ro-2"], timeout=0.05)] == ["ro-1"]
    assert len(await ticking.wait_for_rollouts(["ro-1"])) == 1
    with pytest.raises(NotFound):
        await ticking.wait_for_rollouts(["ro-1", "ro-9"], timeout=0.05)


async def test_a_cancellation_reaches_a_waiting_worker(ticking: Store) -> None:
    await ticking.enqueue_rollout(None, rollout_id="ro-1")
    claimed = await ticking.dequeue_rollout("worker-0")
    assert claimed is not None
    waiting = asyncio.create_task(ticking.wait_for_cancellations("worker-0", timeout=LONG))
    other = asyncio.create_task(ticking.wait_for_cancellations("worker-1", timeout=0.3))
    await asyncio.sleep(0.05)
    await ticking.cancel_rollouts(["ro-1"], "enough")
    async with asyncio.timeout(LONG / 3):
        assert await waiting == [("ro-1", claimed.attempt.attempt_id)]
        assert await other == []


async def test_closing_ends_the_waiting_calls(ticking: Store) -> None:
    await ticking.enqueue_rollout(None, rollout_id="ro-1")
    await ticking.dequeue_rollout("worker-0")
    waiting = [
        asyncio.create_task(ticking.dequeue_rollout("worker-0", timeout=LONG)),
        asyncio.create_task(ticking.read_completions(timeout=LONG)),
        asyncio.create_task(ticking.wait_for_rollouts(["ro-1"])),
        asyncio.create_task(ticking.wait_for_cancellations("worker-0", timeout=LONG)),
    ]
    await asyncio.sleep(0.05)
    await ticking.close()
    async with asyncio.timeout(LONG / 3):
        results = await asyncio.gather(*waiting)
    assert results == [None, [], [], []]
