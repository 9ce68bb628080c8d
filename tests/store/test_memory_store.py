"""What is particular to the store in memory: its clock, its timer, and how it uses memory."""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

from rollwright.store.memory import MemoryStore
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
    assert len(store._ledger.leases._heap) < 100
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
    ledger = store._ledger
    assert len(ledger.rollouts) <= 11
    assert len(ledger.log._entries) < 50
    assert len(ledger.ready._heap) + len(ledger.leases._heap) < 200
    assert ledger.claims == {}
    assert [each.cursor for each in await store.read_completions(1998)] == [1999, 2000]
    await store.close()


async def test_a_cursor_beyond_the_end_gives_nothing() -> None:
    store = MemoryStore()
    await store.enqueue_rollout({}, rollout_id="r")
    assert await store.read_events(2**63 - 2, limit=10_000) == []
    assert await store.read_completions(2**63 - 2, limit=10_000) == []
    await store.close()
