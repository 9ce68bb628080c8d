"""The end of an attempt and the claim of the next rollout in one call: over every backend."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rollwright.store.api import Store
from rollwright.store.errors import AttemptRefused, NotFound, StoreError
from rollwright.store.invariants import complaints
from rollwright.store.records import (
    AttemptedRollout,
    AttemptStatus,
    EnqueueRequest,
    RolloutConfig,
    RolloutStatus,
)

Advance = Callable[[float], Awaitable[None]]


async def claim(store: Store, worker_id: str = "worker-0") -> AttemptedRollout:
    claimed = await store.dequeue_rollout(worker_id)
    assert claimed is not None
    return claimed


def pair(claimed: AttemptedRollout) -> tuple[str, str]:
    return claimed.rollout_id, claimed.attempt.attempt_id


async def enqueue(store: Store, count: int, **config: float) -> None:
    settings = RolloutConfig(**config)  # type: ignore[arg-type]
    await store.enqueue_many_rollouts([EnqueueRequest(n, f"ro-{n}", config=settings) for n in range(count)])


async def test_it_ends_as_a_report_does_and_claims_as_a_dequeue_does(store: Store) -> None:
    await enqueue(store, 3)
    first = await claim(store)
    [second] = await store.finish_and_dequeue(
        *pair(first), status="succeeded", worker_id="worker-0", trajectory=b"turns", metadata={"turns": 1}
    )
    assert (second.rollout_id, second.input, second.status) == ("ro-1", 1, RolloutStatus.PREPARING)
    assert second.attempt == await store.get_latest_attempt("ro-1")
    ended = await store.get_latest_attempt("ro-0")
    assert ended is not None
    assert (ended.status, ended.metadata) == (AttemptStatus.SUCCEEDED, {"turns": 1})
    assert await store.get_trajectories(["ro-0"]) == {"ro-0": b"turns"}
    [third] = await store.finish_and_dequeue(*pair(second), status="succeeded", worker_id="worker-0")
    assert await store.finish_and_dequeue(*pair(third), status="succeeded", worker_id="worker-0") == []
    completions = await store.read_completions()
    assert [each.rollout_id for each in completions] == ["ro-0", "ro-1", "ro-2"]
    assert complaints(await store.read_events(), completions) == []
    [worker] = await store.query_workers()
    assert (worker.worker_id, worker.status) == ("worker-0", "idle")


async def test_callers_of_the_same_moment_each_get_a_rollout_of_their_own(store: Store) -> None:
    await enqueue(store, 11, max_attempts=1)
    held = [await claim(store, f"worker-{n}") for n in range(6)]
    await store.update_attempt(*pair(held[2]), status="failed")
    calls = [
        store.finish_and_dequeue(*pair(each), status="succeeded", worker_id=each.attempt.worker_id)
        for each in held
    ]
    given = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(given[2], AttemptRefused)
    accepted = [each for each in given if isinstance(each, list)]
    assert [[each.rollout_id for each in claimed] for claimed in accepted] == [
        [f"ro-{number}"] for number in (6, 7, 8, 9, 10)
    ]
    holders = [claimed[0].attempt.worker_id for claimed in accepted]
    assert holders == [f"worker-{number}" for number in (0, 1, 3, 4, 5)]
    completions = await store.read_completions()
    assert len(completions) == 6
    assert complaints(await store.read_events(), completions) == []


async def test_a_rejected_report_claims_nothing(store: Store, advance: Advance) -> None:
    await enqueue(store, 2, unresponsive_seconds=10.0, max_attempts=2)
    late = await claim(store)
    with pytest.raises(NotFound):
        await store.finish_and_dequeue("ro-0", "at-unknown", status="succeeded", worker_id="worker-0")
    with pytest.raises(AttemptRefused, match="holds it, not worker-1"):
        await store.finish_and_dequeue(*pair(late), status="succeeded", worker_id="worker-1")
    await advance(10.0)
    with pytest.raises(AttemptRefused):
        await store.finish_and_dequeue(*pair(late), status="succeeded", worker_id="worker-0")
    counts = await store.statistics()
    assert (counts["attempts"], counts[RolloutStatus.SUCCEEDED]) == (1, 0)
    assert complaints(await store.read_events(), await store.read_completions()) == []


async def test_a_failed_attempt_may_be_followed_by_the_next_of_the_same_rollout(store: Store) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=(AttemptStatus.FAILED,))
    await store.enqueue_rollout(None, rollout_id="ro-0", config=config)
    first = await claim(store)
    [second] = await store.finish_and_dequeue(*pair(first), status="failed", reason="it broke")
    assert (second.rollout_id, second.attempt.sequence_id) == ("ro-0", 2)
    assert second.attempt.attempt_id != first.attempt.attempt_id
    with pytest.raises(AttemptRefused):
        await store.finish_and_dequeue(*pair(first), status="succeeded")
    assert await store.finish_and_dequeue(*pair(second), status="failed", reason="again") == []
    [completion] = await store.read_completions()
    assert (completion.status, completion.reason) == (RolloutStatus.FAILED, "again")


async def test_a_repeat_with_the_same_claim_id_ends_and_claims_once(store: Store) -> None:
    """As when the reply was lost, or a network delivers a message twice."""
    await enqueue(store, 4)
    first = await claim(store)
    calls = [
        store.finish_and_dequeue(*pair(first), status="succeeded", worker_id="worker-0", claim_id="next")
        for _ in range(2)
    ]
    [[one], [two]] = await asyncio.gather(*calls)
    [three] = await store.finish_and_dequeue(
        *pair(first), status="succeeded", worker_id="worker-0", claim_id="next"
    )
    assert one.attempt == two.attempt == three.attempt
    assert [each.rollout_id for each in await store.read_completions()] == ["ro-0"]
    counts = await store.statistics()
    assert (counts["attempts"], counts[RolloutStatus.QUEUING]) == (2, 2)


async def test_a_lease_that_has_expired_is_ended_before_the_next_claim(
    store: Store, advance: Advance
) -> None:
    await store.enqueue_rollout(
        None, rollout_id="ro-lost", config=RolloutConfig(unresponsive_seconds=5.0, max_attempts=2)
    )
    lost = await claim(store, "worker-dead")
    await store.enqueue_rollout(None, rollout_id="ro-mine")
    mine = await claim(store)
    await advance(6.0)
    [again] = await store.finish_and_dequeue(*pair(mine), status="succeeded", worker_id="worker-0")
    assert (again.rollout_id, again.attempt.sequence_id) == ("ro-lost", 2), "it keeps its place in the queue"
    with pytest.raises(AttemptRefused):
        await store.update_attempt(*pair(lost), status="succeeded")
    assert complaints(await store.read_events(), await store.read_completions()) == []


async def test_a_call_that_is_not_the_end_of_one_attempt_is_an_error(store: Store) -> None:
    with pytest.raises(StoreError, match="ends with a final status, not with running"):
        await store.finish_and_dequeue("ro-0", "at-0", status="running")
    with pytest.raises(StoreError, match="not by 'latest'"):
        await store.finish_and_dequeue("ro-0", "latest", status="succeeded")


async def test_what_a_caller_claimed_who_stopped_waiting_is_claimed_by_another(ticking: Store) -> None:
    await enqueue(ticking, 2)
    first = await claim(ticking)
    call = asyncio.create_task(
        ticking.finish_and_dequeue(*pair(first), status="succeeded", worker_id="worker-0")
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    if not call.cancelled():  # memory answers at once: the caller has its rollout
        [second] = call.result()
        await ticking.update_attempt(*pair(second), status="cancelled")
    taken = await ticking.dequeue_rollout("worker-1", timeout=20)
    assert taken is not None
    left = {"ro-0", "ro-1"} - {each.rollout_id for each in await ticking.read_completions()}
    if taken.rollout_id == "ro-0":  # the call was cancelled before it was sent
        assert left == {"ro-0", "ro-1"}
    else:
        [attempt] = [each for each in await ticking.query_attempts("ro-1") if each.end_time is None]
        assert attempt.worker_id == "worker-1"
