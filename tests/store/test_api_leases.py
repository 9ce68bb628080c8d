"""Leases, retries and fencing: over every backend."""

from collections.abc import Awaitable, Callable

import pytest

from rollwright.store.api import Store
from rollwright.store.errors import AttemptRefused, ImpossibleChange, NotFound, StoreError
from rollwright.store.records import (
    AttemptedRollout,
    AttemptStatus,
    RolloutConfig,
    RolloutStatus,
    WorkerStatus,
)

Advance = Callable[[float], Awaitable[None]]


async def claim(store: Store, worker_id: str = "worker-0") -> AttemptedRollout:
    claimed = await store.dequeue_rollout(worker_id)
    assert claimed is not None
    return claimed


async def status_of(store: Store, rollout_id: str) -> RolloutStatus:
    rollout = await store.get_rollout_by_id(rollout_id)
    assert rollout is not None
    return rollout.status


async def test_a_silent_worker_loses_its_rollout_to_another(store: Store, advance: Advance) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1", config=RolloutConfig(unresponsive_seconds=10))
    first = await claim(store, "worker-0")
    await advance(10)
    second = await claim(store, "worker-1")
    assert second.rollout_id == "ro-1"
    assert second.attempt.sequence_id == 2
    for status in ("succeeded", "failed", "running", None):
        with pytest.raises(AttemptRefused, match="no heartbeat"):
            await store.update_attempt("ro-1", first.attempt.attempt_id, status=status)
    with pytest.raises(AttemptRefused):
        await store.append_journal("ro-1", first.attempt.attempt_id, [b"turn"])
    with pytest.raises(AttemptRefused):
        await store.clear_journal("ro-1", first.attempt.attempt_id)
    await store.update_attempt("ro-1", second.attempt.attempt_id, status="succeeded", trajectory=b"second")
    assert await store.get_trajectories(["ro-1"]) == {"ro-1": b"second"}
    attempts = await store.query_attempts("ro-1")
    assert [each.status for each in attempts] == [AttemptStatus.UNRESPONSIVE, AttemptStatus.SUCCEEDED]
    assert all(each.end_time is not None for each in attempts)


async def test_a_late_commit_is_refused_even_if_nobody_else_took_over(store: Store, advance: Advance) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1", config=RolloutConfig(unresponsive_seconds=10))
    first = await claim(store)
    await advance(10)
    with pytest.raises(AttemptRefused):
        await store.update_attempt("ro-1", first.attempt.attempt_id, status="succeeded", trajectory=b"late")
    assert await status_of(store, "ro-1") is RolloutStatus.REQUEUING
    assert await store.read_completions() == []


async def test_an_attempt_lives_up_to_the_end_of_its_lease(store: Store, advance: Advance) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1", config=RolloutConfig(unresponsive_seconds=10))
    first = await claim(store)
    await advance(9.5)
    await store.update_attempt("ro-1", first.attempt.attempt_id, status="succeeded")
    assert await status_of(store, "ro-1") is RolloutStatus.SUCCEEDED


@pytest.mark.parametrize("sign_of_life", ["worker", "worker, all it holds", "attempt", "journal", "clear"])
async def test_any_sign_of_life_extends_the_lease(store: Store, advance: Advance, sign_of_life: str) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1", config=RolloutConfig(unresponsive_seconds=10))
    claimed = await claim(store)
    pair = ("ro-1", claimed.attempt.attempt_id)
    for _ in range(4):
        await advance(6)
        match sign_of_life:
            case "worker":
                assert await store.update_worker("worker-0", attempts=[pair]) == []
            case "worker, all it holds":
                assert await store.update_worker("worker-0") == []
            case "attempt":
                await store.update_attempt(*pair)
            case "journal":
                await store.append_journal(*pair, [b"turn"])
            case "clear":
                await store.clear_journal(*pair)
    await advance(9)
    await store.update_attempt(*pair, status="succeeded")


async def test_a_heartbeat_extends_only_what_it_names(store: Store, advance: Advance) -> None:
    config = RolloutConfig(unresponsive_seconds=10)
    for name in ("ro-1", "ro-2"):
        await store.enqueue_rollout(None, rollout_id=name, config=config)
    one, two = await store.dequeue_many_rollouts(2, "worker-0")
    await advance(6)
    await store.update_worker("worker-0", attempts=[("ro-1", one.attempt.attempt_id)])
    await advance(6)
    await store.update_attempt("ro-1", one.attempt.attempt_id, status="succeeded")
    with pytest.raises(AttemptRefused):
        await store.update_attempt("ro-2", two.attempt.attempt_id, status="succeeded")


async def test_a_heartbeat_names_what_is_not_held(store: Store) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1")
    claimed = await claim(store, "worker-0")
    pairs = [("ro-1", claimed.attempt.attempt_id), ("ro-1", "at-other"), ("nowhere", "at-1")]
    assert await store.update_worker("worker-0", attempts=pairs) == pairs[1:]
    assert await store.update_worker("worker-1", attempts=pairs) == pairs


async def test_heartbeats_do_not_outlast_the_time_limit(store: Store, advance: Advance) -> None:
    config = RolloutConfig(unresponsive_seconds=10, timeout_seconds=15, max_attempts=1)
    await store.enqueue_rollout(None, rollout_id="ro-1", config=config)
    claimed = await claim(store)
    pair = ("ro-1", claimed.attempt.attempt_id)
    await advance(8)
    assert await store.update_worker("worker-0", attempts=[pair]) == []
    await advance(8)
    assert await store.update_worker("worker-0", attempts=[pair]) == [pair]
    [attempt] = await store.query_attempts("ro-1")
    assert attempt.status is AttemptStatus.TIMEOUT
    assert attempt.reason is not None
    assert "timeout_seconds=15" in attempt.reason
    assert await status_of(store, "ro-1") is RolloutStatus.FAILED
    assert await store.wait_for_cancellations("worker-0", timeout=0) == [pair]


async def test_without_limits_an_attempt_lasts_for_ever(store: Store, advance: Advance) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1", config=RolloutConfig(unresponsive_seconds=None))
    claimed = await claim(store)
    assert claimed.attempt.lease_expires is None
    await advance(1e6)
    await store.update_attempt("ro-1", claimed.attempt.attempt_id, status="succeeded")


async def test_a_failed_attempt_is_tried_again_up_to_the_limit(store: Store) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1", config=RolloutConfig(max_attempts=3))
    for sequence in (1, 2, 3):
        claimed = await claim(store)
        assert claimed.attempt.sequence_id == sequence
        await store.update_attempt(
            "ro-1", claimed.attempt.attempt_id, status="failed", reason="no luck", trajectory=b"partial"
        )
    assert await status_of(store, "ro-1") is RolloutStatus.FAILED
    assert await store.dequeue_rollout("worker-0") is None
    [completion] = await store.read_completions()
    assert (completion.status, completion.reason) == (RolloutStatus.FAILED, "no luck")
    assert await store.get_trajectories(["ro-1"]) == {}
    assert await store.get_trajectories(["ro-1"], failed=True) == {"ro-1": b"partial"}


async def test_only_the_named_ends_are_tried_again(store: Store, advance: Advance) -> None:
    config = RolloutConfig(unresponsive_seconds=10, retry_condition=(AttemptStatus.UNRESPONSIVE,))
    for name in ("ro-1", "ro-2"):
        await store.enqueue_rollout(None, rollout_id=name, config=config)
    failing, _silent = await store.dequeue_many_rollouts(2, "worker-0")
    await store.update_attempt("ro-1", failing.attempt.attempt_id, status="failed")
    await advance(11)
    assert await status_of(store, "ro-1") is RolloutStatus.FAILED
    assert await status_of(store, "ro-2") is RolloutStatus.REQUEUING


async def test_a_rollout_that_is_given_back_is_no_try(store: Store) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1", config=RolloutConfig(max_attempts=1))
    for _ in range(3):
        claimed = await claim(store)
        await store.update_attempt("ro-1", claimed.attempt.attempt_id, status="cancelled", reason="draining")
        assert await status_of(store, "ro-1") is RolloutStatus.REQUEUING
    assert await store.wait_for_cancellations("worker-0", timeout=0) == []
    claimed = await claim(store)
    await store.update_attempt("ro-1", claimed.attempt.attempt_id, status="failed")
    assert await status_of(store, "ro-1") is RolloutStatus.FAILED


async def test_a_retried_rollout_keeps_its_place(store: Store) -> None:
    for name in ("ro-1", "ro-2"):
        await store.enqueue_rollout(None, rollout_id=name)
    claimed = await claim(store)
    await store.update_attempt("ro-1", claimed.attempt.attempt_id, status="failed")
    assert (await claim(store)).rollout_id == "ro-1"


async def test_a_repeated_report_is_taken_once(store: Store) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1")
    claimed = await claim(store)
    pair = ("ro-1", claimed.attempt.attempt_id)
    first = await store.update_attempt(*pair, status="succeeded", trajectory=b"one")
    assert await store.update_attempt(*pair, status="succeeded", trajectory=b"two") == first
    assert await store.get_trajectories(["ro-1"]) == {"ro-1": b"one"}
    assert len(await store.read_completions()) == 1
    for other in ("failed", "cancelled", "timeout", "running", None):
        with pytest.raises(AttemptRefused, match="it is succeeded"):
            await store.update_attempt(*pair, status=other)


async def test_a_repeated_failure_does_not_use_up_tries(store: Store) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1", config=RolloutConfig(max_attempts=2))
    first = await claim(store)
    for _ in range(3):
        await store.update_attempt("ro-1", first.attempt.attempt_id, status="failed")
    second = await claim(store)
    await store.update_attempt("ro-1", first.attempt.attempt_id, status="failed")
    await store.update_attempt("ro-1", second.attempt.attempt_id, status="succeeded")
    assert await status_of(store, "ro-1") is RolloutStatus.SUCCEEDED


async def test_an_attempt_cannot_go_back(store: Store) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1")
    claimed = await claim(store)
    pair = ("ro-1", claimed.attempt.attempt_id)
    await store.update_attempt(*pair, status="running")
    await store.update_attempt(*pair, status="running")
    with pytest.raises(ImpossibleChange, match="running and cannot become preparing"):
        await store.update_attempt(*pair, status="preparing")
    with pytest.raises(StoreError, match="accepted: preparing"):
        await store.update_attempt(*pair, status="done")
    with pytest.raises(StoreError, match="trajectory"):
        await store.update_attempt(*pair, status="running", trajectory=b"x")
    assert await status_of(store, "ro-1") is RolloutStatus.RUNNING


async def test_unknown_ids_are_not_found(store: Store) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1")
    with pytest.raises(NotFound):
        await store.update_attempt("ro-9", "at-1", status="running")
    with pytest.raises(NotFound):
        await store.update_attempt("ro-1", "at-1", status="running")
    with pytest.raises(NotFound):
        await store.append_journal("ro-1", "at-1", [b"turn"])
    with pytest.raises(NotFound):
        await store.query_attempts("ro-9")
    with pytest.raises(NotFound):
        await store.read_journal("ro-9")
    assert await store.get_rollout_by_id("ro-9") is None
    assert await store.get_latest_attempt("ro-9") is None
    assert await store.get_latest_attempt("ro-1") is None


async def test_a_worker_is_idle_busy_or_not_heard_of(store: Store, advance: Advance) -> None:
    await store.update_worker("worker-0", heartbeat_stats={"cpu": 0.5})
    [worker] = await store.query_workers()
    assert (worker.status, worker.heartbeat_stats) == (WorkerStatus.IDLE, {"cpu": 0.5})
    await store.enqueue_rollout(None, rollout_id="ro-1", config=RolloutConfig(unresponsive_seconds=None))
    claimed = await claim(store)
    worker = (await store.query_workers(status="busy"))[0]
    assert (worker.current_rollout_id, worker.current_attempt_id) == ("ro-1", claimed.attempt.attempt_id)
    assert worker.last_busy_time == worker.last_dequeue_time == claimed.attempt.start_time
    await advance(1000)
    assert [each.worker_id for each in await store.query_workers(status=["unknown"])] == ["worker-0"]
    await store.update_attempt("ro-1", claimed.attempt.attempt_id, status="succeeded")
    back = await store.get_worker_by_id("worker-0")
    assert back is not None
    assert (back.status, back.current_rollout_id) == (WorkerStatus.IDLE, None)
    assert back.last_idle_time == back.last_heartbeat_time
    assert await store.get_worker_by_id("worker-9") is None
