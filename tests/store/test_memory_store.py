"""What is particular to the store in memory: its clock, its timer, and how it uses memory."""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

import pytest

from rollwright.store.memory import MemoryStore
from rollwright.store.memory.waiters import Waiter
from rollwright.store.records import RolloutConfig


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Time passes only when nothing is left to do, and then at once up to the next timer."""

    def __init__(self) -> None:
        super().__init__(_NoWaiting(self._skip))
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _skip(self, seconds: float) -> None:
        self._now += seconds


class _NoWaiting(selectors.SelectSelector):
    def __init__(self, skip: Callable[[float], None]) -> None:
        super().__init__()
        self._skip = skip

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout:
            self._skip(timeout)
        return super().select(0)


def test_leases_end_on_a_loop_with_simulated_time() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        store = MemoryStore()
        config = RolloutConfig(unresponsive_seconds=3600, max_attempts=3)
        await store.enqueue_rollout(None, rollout_id="ro-1", config=config)
        await store.dequeue_rollout("first")
        began = loop.time()
        again = await store.dequeue_rollout("second", timeout=10_000)
        assert again is not None
        took = loop.time() - began
        await store.update_attempt("ro-1", again.attempt.attempt_id, status="succeeded")
        await store.close()
        return took

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        took = runner.run(main())
    assert 3600 <= took < 3601


async def test_a_closed_store_leaves_no_timer_behind() -> None:
    store = MemoryStore()
    await store.enqueue_rollout(None)
    await store.dequeue_rollout("worker-0")
    timer = store._timer
    assert timer is not None
    await store.close()
    assert timer.cancelled()
    assert len(asyncio.all_tasks()) == 1, "only this test"


async def test_heartbeats_do_not_pile_up() -> None:
    store = MemoryStore(record_events=False)
    await store.enqueue_rollout(None, config=RolloutConfig(unresponsive_seconds=1000))
    claimed = await store.dequeue_rollout("worker-0")
    assert claimed is not None
    for _ in range(5000):
        await store.update_worker("worker-0", attempts=[(claimed.rollout_id, claimed.attempt.attempt_id)])
    assert len(store._state.leases._heap) < 100
    await store.close()


async def test_deleted_rollouts_leave_nothing_behind() -> None:
    now = 0.0
    store = MemoryStore(clock=lambda: now, record_events=False)
    for number in range(2000):
        await store.enqueue_rollout(number, rollout_id=f"ro-{number}")
        claimed = await store.dequeue_rollout("worker-0", claim_id=f"c-{number}")
        assert claimed is not None
        await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
        now += 1
        await store.delete_finished(older_than=10)
    state = store._state
    assert len(state.rollouts) <= 11
    assert len(state.log._entries) < 50
    assert len(state.ready._heap) + len(state.leases._heap) < 200
    assert state.claims == {}
    assert [each.cursor for each in await store.read_completions(1998)] == [1999, 2000]
    await store.close()


async def test_a_cursor_beyond_the_end_gives_nothing() -> None:
    store = MemoryStore()
    await store.enqueue_rollout({}, rollout_id="r")
    assert await store.read_events(2**63 - 2, limit=10_000) == []
    assert await store.read_completions(2**63 - 2, limit=10_000) == []
    await store.close()


class WatchedWaiter(Waiter):
    """Counts how often anybody looks at a waiting dequeue."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        WatchedWaiter.looks += 1
        return super().__getattribute__(name)

    def __eq__(self, other: object) -> bool:
        WatchedWaiter.looks += 1
        return self is other

    def __hash__(self) -> int:
        WatchedWaiter.looks += 1
        return id(self)


@pytest.mark.parametrize("ask", ["anonymous", "with claim ids"])
async def test_dequeues_that_wait_cost_each_other_nothing(ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollwright.store.memory.store.Waiter", WatchedWaiter)

    async def looks(count: int) -> int:
        """While so many come, a third of them gives up, a third asks again, and a third is served."""
        store = MemoryStore()
        WatchedWaiter.looks = 0

        def dequeue(number: int) -> asyncio.Task[Any]:
            claim_id = f"claim-{number}" if ask == "with claim ids" else None
            return asyncio.create_task(store.dequeue_rollout("worker-0", timeout=1000, claim_id=claim_id))

        waiting = [dequeue(number) for number in range(count)]
        await asyncio.sleep(0.01)
        for task in waiting[::3]:
            task.cancel()
        again = [dequeue(number) for number in range(1, count, 3)]
        await asyncio.sleep(0.01)
        for number in range(count // 3):
            await store.enqueue_rollout(number)
            await asyncio.sleep(0)
        assert (await store.statistics())["preparing"] == count // 3
        await store.close()
        await asyncio.gather(*waiting, *again, return_exceptions=True)
        return WatchedWaiter.looks

    few, many = await looks(30), await looks(600)
    assert few >= 30
    assert many <= 20 * few


class WatchedId(str):
    """Counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        WatchedId.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


async def test_deleting_what_was_taken_from_a_worker_costs_as_much_for_each_however_many() -> None:
    async def comparisons(count: int) -> int:
        store = MemoryStore()
        ids = [WatchedId(f"ro-{number}") for number in range(count)]
        for each in ids:
            await store.enqueue_rollout(None, rollout_id=each)
        await store.dequeue_many_rollouts(count, "worker-0")
        await store.cancel_rollouts(reversed(ids), "the run ended")
        WatchedId.compared = 0
        assert await store.delete_rollouts(ids) == count
        assert await store.wait_for_cancellations("worker-0", timeout=0) == []
        await store.close()
        return WatchedId.compared

    few, many = await comparisons(30), await comparisons(600)
    assert many <= 20 * max(few, 30)


async def test_who_asks_again_under_the_same_claim_id_replaces_the_call_before() -> None:
    store = MemoryStore()
    first = asyncio.create_task(store.dequeue_rollout("worker-0", timeout=1000, claim_id="claim-0"))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(store.dequeue_rollout("worker-0", timeout=1000, claim_id="claim-0"))
    assert await first is None
    await store.enqueue_rollout("played")
    claimed = await second
    assert claimed is not None
    assert claimed.input == "played"
    await store.close()
