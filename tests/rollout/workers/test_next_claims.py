"""A slot claims its next rollout with the end of the last, while it may keep its place; never beyond what it may play."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

from rollwright.rollout.resources import MachineResources, ResourceLimits, ResourceWatch
from rollwright.store.call_kinds import StoreCall
from rollwright.store.invariants import complaints
from rollwright.store.memory import MemoryStore

PATIENCE = 30.0
"""Seconds after which something that was waited for will not come any more."""


async def quick(task: Any, session: Any) -> float:
    await asyncio.sleep(0)
    return 1.0


class CountingStore(MemoryStore):
    """Counts the calls, and holds back the replies of ends that claim until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.go = asyncio.Event()
        self.go.set()
        self.answered: asyncio.Queue[int] = asyncio.Queue()

    def execute(self, call: StoreCall[Any]) -> Any:
        self.calls[call.name] += 1
        return super().execute(call)

    async def finish_and_dequeue(self, *held: Any, **report: Any) -> Any:
        claimed = await super().finish_and_dequeue(*held, **report)
        self.answered.put_nowait(len(claimed))
        await self.go.wait()
        return claimed


def counted(workshop: Any) -> CountingStore:
    workshop.store = CountingStore()
    return workshop.store


async def test_each_slot_asks_for_its_first_rollout_only(workshop: Any) -> None:
    store = counted(workshop)
    await workshop.enqueue(20)
    async with asyncio.timeout(PATIENCE):
        await workshop.worker(quick, envs=4, max_rollouts=20).run()
    assert store.calls["dequeue_many_rollouts"] == 4
    assert store.calls["finish_and_dequeue"] == 16, (
        "the last end of each slot claims nothing: its quota is used up"
    )
    assert store.calls["update_attempt"] == 4
    assert (await store.statistics())["succeeded"] == 20
    assert complaints(await store.read_events(), await store.read_completions()) == []


async def test_no_slot_claims_beyond_the_quota(workshop: Any) -> None:
    store = counted(workshop)
    await workshop.enqueue(20)
    async with asyncio.timeout(PATIENCE):
        await workshop.worker(quick, envs=4, max_rollouts=7).run()
    counts = await store.statistics()
    assert (counts["succeeded"], counts["queuing"], counts["attempts"]) == (7, 13, 7)


async def test_a_rollout_claimed_while_the_worker_began_to_drain_is_given_back_unplayed(
    workshop: Any,
) -> None:
    store = counted(workshop)
    rollouts = await workshop.enqueue(2, max_attempts=1)
    store.go.clear()
    stopped = workshop.worker(quick, "stopped", envs=1)
    running = workshop.start(stopped)
    async with asyncio.timeout(PATIENCE):
        assert await store.answered.get() == 1
        draining = asyncio.create_task(stopped.drain())
        await asyncio.sleep(0)
        store.go.set()
        assert await draining == 0
        await running
    [first, second] = await store.query_rollouts(rollout_ids=rollouts)
    assert (first.status, second.status) == ("succeeded", "requeuing")
    [given_back] = await store.query_attempts(rollouts[1])
    assert (given_back.status, given_back.reason) == ("cancelled", "the worker was told to stop")
    workshop.start(workshop.worker(quick, "other"))
    await store.wait_for_rollouts(rollouts, timeout=PATIENCE)
    assert (await store.statistics())["succeeded"] == 2, "its only try was not used up"


async def test_a_slot_leaves_its_place_to_one_that_waits_for_it(workshop: Any) -> None:
    """Two slots share one place: neither keeps it for all rollouts."""
    store = counted(workshop)
    await workshop.enqueue(6)
    worker = workshop.worker(quick, envs=2, max_rollouts=6)
    worker._context.inflight.limit = 1
    async with asyncio.timeout(PATIENCE):
        await worker.run()
    assert (await store.statistics())["succeeded"] == 6
    assert store.calls["finish_and_dequeue"] < 2


async def test_a_slot_does_not_keep_its_place_while_the_machine_is_short_or_others_wait() -> None:
    plenty = MachineResources(2**33, 2**34, 10, 1000)
    watch = ResourceWatch(ResourceLimits())
    watch.see(plenty)
    await watch.enter("someone")
    assert watch.may_stay("someone")
    assert not watch.may_stay("one who is not inside")
    watch.see(replace(plenty, free_memory=2**20))
    assert watch.shortage is not None
    assert not watch.may_stay("someone")
    other = asyncio.create_task(watch.enter("other"))
    await asyncio.sleep(0)
    watch.shortage = None
    assert not watch.may_stay("someone"), "another one waits for a place"
    other.cancel()
