"""What several callers ask for in the same moment, and what one caller asks for twice: over every backend."""

import asyncio
from collections.abc import Awaitable, Callable

from rollwright.store.api import Store
from rollwright.store.invariants import complaints
from rollwright.store.records import AttemptStatus, EnqueueRequest, RolloutStatus


async def test_callers_of_the_same_moment_are_served_in_the_order_they_asked(store: Store) -> None:
    await store.enqueue_many_rollouts([EnqueueRequest(None, f"ro-{n}") for n in range(5)])
    await store.enqueue_rollout(None, rollout_id="ro-first", priority=1)
    asks = [store.dequeue_many_rollouts(2, f"worker-{n}") for n in range(4)]
    given = await asyncio.gather(*asks)
    assert [[each.rollout_id for each in claimed] for claimed in given] == [
        ["ro-first", "ro-0"],
        ["ro-1", "ro-2"],
        ["ro-3", "ro-4"],
        [],
    ]


async def test_a_claim_among_others_is_like_one_made_alone(store: Store) -> None:
    for number in range(4):
        await store.enqueue_rollout({"n": number}, metadata={"n": number}, mode="train")
    alone = await store.dequeue_rollout("worker-alone")
    among = await asyncio.gather(*(store.dequeue_rollout(f"worker-{n}") for n in range(3)))
    assert alone is not None
    for number, claimed in enumerate(among):
        assert claimed is not None
        assert claimed.attempt.worker_id == f"worker-{number}"
        assert claimed.attempt == await store.get_latest_attempt(claimed.rollout_id)
        assert (claimed.status, claimed.mode) == (alone.status, "train")
        assert claimed.input == claimed.metadata == {"n": number + 1}
        lease, first = claimed.attempt.lease_expires, alone.attempt.lease_expires
        assert lease is not None
        assert first is not None
        assert lease - claimed.attempt.start_time == first - alone.attempt.start_time
    ids = {alone.attempt.attempt_id, *(each.attempt.attempt_id for each in among if each)}
    assert len(ids) == 4
    workers = {each.worker_id: each for each in await store.query_workers()}
    assert workers["worker-2"].last_dequeue_time == workers["worker-2"].last_busy_time is not None


async def test_rollouts_that_come_in_the_same_moment_are_all_there(store: Store) -> None:
    enqueued = await asyncio.gather(*(store.enqueue_rollout({"n": n}) for n in range(6)))
    assert len({each.rollout_id for each in enqueued}) == 6
    for number, rollout in enumerate(enqueued):
        assert rollout.input == {"n": number}
        assert await store.get_rollout_by_id(rollout.rollout_id) == rollout
    assert [each.rollout_id for each in await store.dequeue_many_rollouts(6)] == [
        each.rollout_id for each in enqueued
    ]


async def test_what_is_delivered_twice_in_the_same_moment_counts_once(store: Store) -> None:
    """As when a network repeats a message instead of losing it."""
    first, second = await asyncio.gather(*(store.enqueue_rollout(1, rollout_id="ro-1") for _ in range(2)))
    assert first == second
    await store.enqueue_rollout(2, rollout_id="ro-2")

    claims = [store.dequeue_many_rollouts(1, "worker-0", claim_id="claim-1") for _ in range(2)]
    [claimed], [again] = await asyncio.gather(*claims)
    assert claimed.attempt == again.attempt
    pair = ("ro-1", claimed.attempt.attempt_id)

    await asyncio.gather(*(store.append_journal(*pair, [b"turn"], append_id="append-1") for _ in range(2)))
    assert await store.read_journal("ro-1") == [b"turn"]

    assert await asyncio.gather(*(store.update_worker("worker-0", attempts=[pair]) for _ in range(2))) == [
        [],
        [],
    ]
    reports = [store.update_attempt(*pair, status="succeeded", trajectory=b"t") for _ in range(2)]
    ended = await asyncio.gather(*reports)
    assert [each.status for each in ended] == [AttemptStatus.SUCCEEDED] * 2

    counts = await store.statistics()
    assert (counts["attempts"], counts[RolloutStatus.SUCCEEDED], counts[RolloutStatus.QUEUING]) == (1, 1, 1)
    completions = await store.read_completions()
    assert [each.rollout_id for each in completions] == ["ro-1"]
    assert complaints(await store.read_events(), completions) == []


async def test_heartbeats_of_the_same_moment_extend_only_what_each_worker_holds(
    store: Store, advance: Callable[[float], Awaitable[None]]
) -> None:
    await store.enqueue_many_rollouts([EnqueueRequest(None, f"ro-{n}") for n in range(3)])
    claimed = await asyncio.gather(*(store.dequeue_rollout(f"worker-{n}") for n in range(2)))
    mine, other = [(each.rollout_id, each.attempt.attempt_id) for each in claimed if each]
    nobodys = await store.dequeue_rollout()
    assert nobodys is not None
    unclaimed = (nobodys.rollout_id, nobodys.attempt.attempt_id)
    await advance(10.0)
    beats = [
        store.update_worker("worker-0", attempts=[mine]),
        store.update_worker("worker-1", attempts=[mine]),
        store.update_worker("worker-1", attempts=[("ro-1", "at-never")]),
        store.update_worker("worker-2", attempts=[unclaimed]),
        store.update_worker("worker-3"),
    ]
    assert await asyncio.gather(*beats) == [[], [mine], [("ro-1", "at-never")], [], []]
    extended = {}
    for rollout_id, attempt_id in (mine, other, unclaimed):
        attempt = await store.get_latest_attempt(rollout_id)
        assert attempt is not None
        assert attempt.attempt_id == attempt_id
        extended[rollout_id] = (attempt.worker_id, (attempt.last_heartbeat_time or 0) - attempt.start_time)
    assert extended == {"ro-0": ("worker-0", 10.0), "ro-1": ("worker-1", 0.0), "ro-2": ("worker-2", 10.0)}


async def test_a_repeated_cancellation_cancels_once(store: Store) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1")
    both = await asyncio.gather(*(store.cancel_rollouts(["ro-1"], "enough") for _ in range(2)))
    assert sorted(both) == [[], ["ro-1"]]
    assert len(await store.read_completions()) == 1
