"""Asking for episodes and giving them out: over every backend."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from rollwright.store.api import Store
from rollwright.store.errors import AttemptRefused, ImpossibleChange, NotFound, StoreError
from rollwright.store.records import (
    AttemptStatus,
    EnqueueRequest,
    RolloutConfig,
    RolloutStatus,
    WorkerStatus,
)

Advance = Callable[[float], Awaitable[None]]


async def test_a_rollout_goes_through_its_whole_life(store: Store) -> None:
    queued = await store.enqueue_rollout({"prompt": "Task 1"}, mode="train", metadata={"group": "g1"})
    assert queued.status is RolloutStatus.QUEUING
    assert queued.input == {"prompt": "Task 1"}

    claimed = await store.dequeue_rollout(worker_id="worker-0")
    assert claimed is not None
    assert claimed.rollout_id == queued.rollout_id
    assert claimed.status is RolloutStatus.PREPARING
    assert claimed.attempt.sequence_id == 1
    assert claimed.attempt.worker_id == "worker-0"
    assert claimed.metadata == {"group": "g1"}

    attempt_id = claimed.attempt.attempt_id
    await store.update_attempt(queued.rollout_id, attempt_id, worker_id="worker-0", status="running")
    running = await store.get_rollout_by_id(queued.rollout_id)
    assert running is not None
    assert running.status is RolloutStatus.RUNNING

    ended = await store.update_attempt(
        queued.rollout_id, attempt_id, status="succeeded", trajectory=b"the turns", metadata={"turns": 3}
    )
    assert ended.status is AttemptStatus.SUCCEEDED
    assert ended.end_time is not None
    assert ended.metadata == {"turns": 3}
    final = await store.get_rollout_by_id(queued.rollout_id)
    assert final is not None
    assert final.status is RolloutStatus.SUCCEEDED
    assert final.end_time is not None
    assert await store.get_trajectories([queued.rollout_id]) == {queued.rollout_id: b"the turns"}
    [completion] = await store.read_completions()
    assert (completion.rollout_id, completion.attempt_id) == (queued.rollout_id, attempt_id)
    assert completion.status is RolloutStatus.SUCCEEDED


async def test_an_empty_queue_gives_nothing_at_once(store: Store) -> None:
    assert await store.dequeue_rollout("worker-0") is None
    assert await store.dequeue_many_rollouts(5, "worker-0") == []


async def test_rollouts_are_given_out_in_the_order_they_came(store: Store) -> None:
    names = [f"ro-{number}" for number in range(5)]
    for name in names:
        await store.enqueue_rollout(None, rollout_id=name)
    claimed = await store.dequeue_many_rollouts(3, "worker-0")
    claimed += await store.dequeue_many_rollouts(9, "worker-0")
    assert [each.rollout_id for each in claimed] == names


async def test_a_higher_priority_goes_first(store: Store) -> None:
    for name, priority in [("low", -1), ("first", 0), ("second", 0), ("high", 7)]:
        await store.enqueue_rollout(None, rollout_id=name, priority=priority)
    await store.update_rollout("second", priority=1)
    claimed = await store.dequeue_many_rollouts(4)
    assert [each.rollout_id for each in claimed] == ["high", "second", "first", "low"]


async def test_enqueueing_an_id_again_changes_nothing(store: Store) -> None:
    first = await store.enqueue_rollout({"n": 1}, rollout_id="ro-1", priority=2)
    again = await store.enqueue_rollout({"n": 2}, rollout_id="ro-1")
    assert again == first
    assert (await store.query_rollouts()).total == 1
    await store.dequeue_rollout()
    assert (await store.enqueue_rollout({}, rollout_id="ro-1")).status is RolloutStatus.PREPARING
    assert await store.dequeue_rollout() is None


async def test_the_same_id_twice_in_one_call_enqueues_once(store: Store) -> None:
    request = EnqueueRequest(input=1, rollout_id="ro-1")
    both = await store.enqueue_many_rollouts([request, request])
    assert both[0] == both[1]
    assert (await store.statistics())["queuing"] == 1


async def test_many_are_enqueued_all_or_none(store: Store) -> None:
    good = EnqueueRequest(input=1, rollout_id="good")
    for bad in [
        EnqueueRequest(input=object(), rollout_id="bad"),
        EnqueueRequest(input=1, rollout_id="bad id"),
        EnqueueRequest(input=1, resources_id="unknown"),
        EnqueueRequest(input=1, config=RolloutConfig(max_attempts=0)),
        EnqueueRequest(input=1, config=RolloutConfig(timeout_seconds=float("nan"))),
    ]:
        with pytest.raises(StoreError):
            await store.enqueue_many_rollouts([good, bad])
    assert (await store.query_rollouts()).total == 0


@pytest.mark.parametrize("odd", ["", "a b", "a/b", "ü", "x" * 201, "a\n", "'; --"])
async def test_ids_with_odd_characters_are_refused(store: Store, odd: str) -> None:
    with pytest.raises(StoreError, match="is not an id"):
        await store.enqueue_rollout(None, rollout_id=odd)
    with pytest.raises(StoreError, match="is not an id"):
        await store.dequeue_rollout(odd)


async def test_what_goes_in_and_out_is_not_shared(store: Store) -> None:
    given = {"tasks": [1]}
    mine = await store.enqueue_rollout(given, rollout_id="ro-1", metadata={"tags": ["a"]})
    given["tasks"].append(2)
    mine.input["tasks"].append(3)
    mine.metadata["tags"].append("b")
    kept = await store.get_rollout_by_id("ro-1")
    assert kept is not None
    assert (kept.input, kept.metadata) == ({"tasks": [1]}, {"tags": ["a"]})
    claimed = await store.dequeue_rollout("worker-0")
    assert claimed is not None
    claimed.attempt.metadata["x"] = 1
    attempt = await store.get_latest_attempt("ro-1")
    assert attempt is not None
    assert attempt.metadata == {}


async def test_plain_data_comes_back_as_it_went_in(store: Store) -> None:
    data = {"text": "ü", "int": 2**62, "float": 0.1, "none": None, "list": [True, {"deep": b"\x00\xff"}]}
    rollout = await store.enqueue_rollout(data)
    claimed = await store.dequeue_rollout()
    assert claimed is not None
    assert claimed.input == data
    assert rollout.input == data


async def test_each_rollout_goes_to_one_worker_and_workers_share(store: Store) -> None:
    for number in range(40):
        await store.enqueue_rollout({"task": number})
    taken: list[tuple[str, str]] = []

    async def work(worker_id: str) -> None:
        while (claimed := await store.dequeue_rollout(worker_id)) is not None:
            taken.append((worker_id, claimed.rollout_id))
            await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")

    await asyncio.gather(*(work(f"worker-{number}") for number in range(4)))
    assert len({rollout_id for _, rollout_id in taken}) == len(taken) == 40
    shares = Counter(worker_id for worker_id, _ in taken)
    assert min(shares[f"worker-{number}"] for number in range(4)) >= 5, shares


async def test_the_same_claim_id_returns_the_same_claim(store: Store) -> None:
    for number in range(4):
        await store.enqueue_rollout(number)
    first = await store.dequeue_many_rollouts(2, "worker-0", claim_id="c1")
    again = await store.dequeue_many_rollouts(2, "worker-0", claim_id="c1")
    assert again == first
    assert len(await store.dequeue_many_rollouts(9, "worker-0", claim_id="c2")) == 2
    for each in first:
        await store.update_attempt(each.rollout_id, each.attempt.attempt_id, status="succeeded")
    assert await store.dequeue_many_rollouts(2, "worker-0", claim_id="c1") == []


async def test_one_particular_rollout_can_be_claimed_out_of_turn(store: Store) -> None:
    await store.enqueue_rollout(None, rollout_id="first")
    await store.enqueue_rollout(None, rollout_id="second")
    started = await store.start_attempt("second", "worker-0", claim_id="c1")
    assert started.attempt.worker_id == "worker-0"
    assert (await store.start_attempt("second", "worker-0", claim_id="c1")) == started
    with pytest.raises(ImpossibleChange, match="only a waiting one"):
        await store.start_attempt("second", "worker-1")
    assert [each.rollout_id for each in await store.dequeue_many_rollouts(5)] == ["first"]
    with pytest.raises(NotFound):
        await store.start_attempt("third")


async def test_a_started_rollout_never_waits_in_the_queue(store: Store) -> None:
    started = await store.start_rollout({"n": 1}, worker_id="worker-0", mode="val")
    assert started.status is RolloutStatus.PREPARING
    assert started.attempt.sequence_id == 1
    assert await store.dequeue_rollout() is None


async def test_an_attempt_without_a_worker_is_claimed_by_the_first_report(store: Store) -> None:
    await store.enqueue_rollout(None)
    claimed = await store.dequeue_rollout()
    assert claimed is not None
    attempt_id = claimed.attempt.attempt_id
    taken = await store.update_attempt(claimed.rollout_id, attempt_id, worker_id="worker-3")
    assert taken.worker_id == "worker-3"
    with pytest.raises(AttemptRefused, match="worker-3 holds it"):
        await store.update_attempt(claimed.rollout_id, attempt_id, worker_id="thief", status="succeeded")
    worker = await store.get_worker_by_id("worker-3")
    assert worker is not None
    assert worker.status is WorkerStatus.BUSY
    assert worker.current_attempt_id == attempt_id


async def test_latest_stands_for_the_newest_attempt(store: Store) -> None:
    rollout = await store.enqueue_rollout(None)
    with pytest.raises(NotFound):
        await store.update_attempt(rollout.rollout_id, "latest", status="running")
    await store.dequeue_rollout()
    await store.update_attempt(rollout.rollout_id, "latest", status="failed", reason="engine died")
    again = await store.dequeue_rollout()
    assert again is not None
    assert again.attempt.sequence_id == 2
    ended = await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    assert ended.attempt_id == again.attempt.attempt_id


async def test_a_cancelled_rollout_is_withdrawn_from_the_queue(store: Store) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1")
    await store.enqueue_rollout(None, rollout_id="ro-2")
    assert await store.cancel_rollouts(["ro-1"], "not needed") == ["ro-1"]
    assert await store.cancel_rollouts(["ro-1"], "not needed") == []
    assert [each.rollout_id for each in await store.dequeue_many_rollouts(5)] == ["ro-2"]
    [completion] = await store.read_completions()
    assert (completion.rollout_id, completion.attempt_id) == ("ro-1", None)
    assert (completion.status, completion.reason) == (RolloutStatus.CANCELLED, "not needed")
    with pytest.raises(NotFound):
        await store.cancel_rollouts(["ro-2", "ro-3"], "")
    kept = await store.get_rollout_by_id("ro-2")
    assert kept is not None
    assert kept.status is RolloutStatus.PREPARING


async def test_a_cancelled_rollout_can_never_succeed(store: Store) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1")
    claimed = await store.dequeue_rollout("worker-0")
    assert claimed is not None
    pair = ("ro-1", claimed.attempt.attempt_id)
    await store.cancel_rollouts(["ro-1"], "group is complete")
    with pytest.raises(AttemptRefused, match="group is complete"):
        await store.update_attempt(*pair, status="succeeded", trajectory=b"late")
    rollout = await store.get_rollout_by_id("ro-1")
    assert rollout is not None
    assert rollout.status is RolloutStatus.CANCELLED
    assert await store.get_trajectories(["ro-1"]) == {}
    assert await store.update_worker("worker-0", attempts=[pair]) == [pair]
    assert await store.wait_for_cancellations("worker-0", timeout=0) == [pair]
    assert await store.wait_for_cancellations("worker-0", timeout=0) == []


async def test_a_caller_can_change_a_rollout_but_not_play_it(store: Store) -> None:
    await store.enqueue_rollout({"n": 1}, rollout_id="ro-1", metadata={"a": 1})
    changed = await store.update_rollout(
        "ro-1", mode="val", metadata={"b": 2}, config=RolloutConfig(max_attempts=9)
    )
    assert (changed.mode, changed.metadata, changed.config.max_attempts) == ("val", {"a": 1, "b": 2}, 9)
    for status in ("preparing", "running", "succeeded"):
        with pytest.raises(ImpossibleChange, match="ro-1 is queuing"):
            await store.update_rollout("ro-1", status=status)
    assert (await store.update_rollout("ro-1", status="requeuing")).status is RolloutStatus.QUEUING
    assert (await store.update_rollout("ro-1", status="failed", reason="bad level")).end_time is not None
    for status in ("requeuing", "cancelled", "queuing"):
        with pytest.raises(ImpossibleChange, match="final"):
            await store.update_rollout("ro-1", status=status)
    with pytest.raises(NotFound):
        await store.update_rollout("ro-2", mode="val")
    with pytest.raises(StoreError, match="accepted: queuing"):
        await store.update_rollout("ro-1", status="bogus")


async def test_a_rollout_can_be_taken_from_its_worker(store: Store) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1", config=RolloutConfig(max_attempts=1))
    claimed = await store.dequeue_rollout("worker-0")
    assert claimed is not None
    pair = ("ro-1", claimed.attempt.attempt_id)
    assert (await store.update_rollout("ro-1", status="requeuing")).status is RolloutStatus.REQUEUING
    assert await store.wait_for_cancellations("worker-0", timeout=0) == [pair]
    with pytest.raises(AttemptRefused):
        await store.append_journal(*pair, [b"turn"])
    again = await store.dequeue_rollout("worker-1")
    assert again is not None
    assert again.attempt.sequence_id == 2
