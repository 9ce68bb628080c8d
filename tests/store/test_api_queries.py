"""Queries, the journal, the logs, resources and housekeeping: over every backend."""

from collections.abc import Awaitable, Callable

import pytest

from rollwright.store.api import Store
from rollwright.store.errors import AttemptRefused, ImpossibleChange, NotFound, StoreError
from rollwright.store.invariants import complaints
from rollwright.store.records import AttemptStatus, EventKind, RolloutConfig, RolloutStatus

Advance = Callable[[float], Awaitable[None]]


async def filled(store: Store, advance: Advance) -> None:
    """Five rollouts, a second apart: cancelled, failed for good, running, claimed, waiting."""
    for number, mode in enumerate(["train", "val", "train", "val", None]):
        await store.enqueue_rollout({"n": number}, rollout_id=f"ro-{number}", mode=mode, priority=number % 2)
        await advance(1)
    await store.cancel_rollouts(["ro-0"], "enough")
    await advance(1)
    await store.update_rollout("ro-1", status="failed")
    started = await store.start_attempt("ro-2", "worker-1")
    await store.update_attempt("ro-2", started.attempt.attempt_id, status="running")
    await store.start_attempt("ro-3", "worker-0")


async def test_rollouts_are_found_by_status_id_and_mode(store: Store, advance: Advance) -> None:
    await filled(store, advance)

    async def found(**filters: object) -> list[str]:
        page = await store.query_rollouts(**filters)  # type: ignore[arg-type]
        assert page.total == len(page)
        return [each.rollout_id for each in page]

    assert await found() == ["ro-0", "ro-1", "ro-2", "ro-3", "ro-4"]
    assert await found(status="preparing") == ["ro-3"]
    assert await found(status=["preparing", RolloutStatus.RUNNING]) == ["ro-2", "ro-3"]
    assert await found(status=[]) == []
    assert await found(rollout_ids=["ro-4", "ro-0", "ro-9"]) == ["ro-0", "ro-4"]
    assert await found(rollout_ids=[]) == []
    assert await found(rollout_ids=["ro-4", "ro-0"], status="queuing") == ["ro-4"]
    assert await found(rollout_id_contains="-3") == ["ro-3"]
    assert await found(rollout_id_contains="_") == []
    assert await found(rollout_id_contains="RO") == []
    assert await found(mode="val") == ["ro-1", "ro-3"]
    assert await found(mode="val", status="failed") == ["ro-1"]


async def test_rollouts_come_sorted_and_in_pages(store: Store, advance: Advance) -> None:
    await filled(store, advance)

    async def sorted_by(field: str, order: str, **page: int) -> list[str]:
        found = await store.query_rollouts(sort_by=field, sort_order=order, **page)  # type: ignore[arg-type]
        assert found.total == 5
        return [each.rollout_id[-1] for each in found.items]

    assert await sorted_by("start_time", "desc") == list("43210")
    assert await sorted_by("end_time", "asc") == list("01234")
    assert await sorted_by("end_time", "desc") == list("10432")
    assert await sorted_by("mode", "asc") == list("02134")
    assert await sorted_by("priority", "desc") == list("31420")
    assert await sorted_by("status", "asc") == list("01342")
    assert await sorted_by("rollout_id", "desc", limit=2, offset=1) == list("32")
    assert await sorted_by("rollout_id", "asc", limit=0) == []
    assert await sorted_by("rollout_id", "asc", offset=9) == []
    with pytest.raises(StoreError, match="accepted: start_time"):
        await sorted_by("input", "asc")
    with pytest.raises(StoreError, match="accepted: asc"):
        await sorted_by("start_time", "up")
    with pytest.raises(StoreError, match="limit"):
        await sorted_by("start_time", "asc", limit=-2)
    with pytest.raises(StoreError, match="accepted: queuing"):
        await store.query_rollouts(status="waiting")


async def test_the_numbers_add_up(store: Store, advance: Advance) -> None:
    await filled(store, advance)
    counts = await store.statistics()
    assert counts == {
        "queuing": 1,
        "preparing": 1,
        "running": 1,
        "requeuing": 0,
        "succeeded": 0,
        "failed": 1,
        "cancelled": 1,
        "attempts": 2,
        "workers": 2,
        "completions": 2,
    }
    assert [each.worker_id for each in await store.query_workers(limit=1)] == ["worker-0"]
    assert (await store.query_workers(limit=1)).total == 2
    assert [each.worker_id for each in await store.query_workers(status="busy", offset=1)] == ["worker-1"]


async def test_attempts_come_in_order(store: Store) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1")
    for _ in range(3):
        claimed = await store.dequeue_rollout("worker-0")
        assert claimed is not None
        await store.update_attempt("ro-1", claimed.attempt.attempt_id, status="failed")
    assert [each.sequence_id for each in await store.query_attempts("ro-1")] == [1, 2, 3]
    page = await store.query_attempts("ro-1", sort_order="desc", limit=1, offset=1)
    assert ([each.sequence_id for each in page], page.total) == ([2], 3)
    latest = await store.get_latest_attempt("ro-1")
    assert latest is not None
    assert latest.sequence_id == 3


async def test_a_journal_is_left_for_the_next_attempt(store: Store) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1")
    first = await store.dequeue_rollout("worker-0")
    assert first is not None
    await store.append_journal("ro-1", first.attempt.attempt_id, [b"one", b"two"])
    attempt = await store.get_latest_attempt("ro-1")
    assert attempt is not None
    assert attempt.status is AttemptStatus.RUNNING
    await store.update_attempt("ro-1", first.attempt.attempt_id, status="failed")
    assert await store.read_journal("ro-1") == [b"one", b"two"]
    second = await store.dequeue_rollout("worker-1")
    assert second is not None
    await store.append_journal("ro-1", second.attempt.attempt_id, [b"three"])
    with pytest.raises(AttemptRefused):
        await store.append_journal("ro-1", first.attempt.attempt_id, [b"late"])
    assert await store.read_journal("ro-1") == [b"one", b"two", b"three"]
    await store.clear_journal("ro-1", second.attempt.attempt_id)
    await store.append_journal("ro-1", second.attempt.attempt_id, [b"anew"])
    assert await store.read_journal("ro-1") == [b"anew"]
    await store.update_attempt("ro-1", second.attempt.attempt_id, status="succeeded")
    assert await store.read_journal("ro-1") == []


async def test_a_repeated_append_is_taken_once(store: Store) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1")
    claimed = await store.dequeue_rollout("worker-0")
    assert claimed is not None
    pair = ("ro-1", claimed.attempt.attempt_id)
    await store.append_journal(*pair, [b"one"], append_id="a1")
    await store.append_journal(*pair, [b"one"], append_id="a1")
    await store.append_journal(*pair, [b"one"], append_id="a2")
    assert await store.read_journal("ro-1") == [b"one", b"one"]


async def test_the_completion_log_is_read_with_a_cursor(store: Store) -> None:
    for number in range(5):
        await store.enqueue_rollout(None, rollout_id=f"ro-{number}")
    order = ["ro-3", "ro-0", "ro-4", "ro-1"]
    for name in order:
        await store.cancel_rollouts([name], "enough")
    first = await store.read_completions(limit=3)
    rest = await store.read_completions(first[-1].cursor)
    assert [each.rollout_id for each in first + rest] == order
    assert [each.cursor for each in first + rest] == [1, 2, 3, 4]
    assert await store.read_completions(4) == []


async def test_only_final_rollouts_can_be_deleted(store: Store) -> None:
    for name in ("ro-1", "ro-2", "ro-3"):
        await store.enqueue_rollout(None, rollout_id=name)
    claimed = await store.dequeue_rollout("worker-0")
    assert claimed is not None
    await store.update_attempt("ro-1", claimed.attempt.attempt_id, status="succeeded", trajectory=b"x")
    await store.cancel_rollouts(["ro-2"], "enough")
    with pytest.raises(ImpossibleChange, match="ro-3 is queuing"):
        await store.delete_rollouts(["ro-1", "ro-3"])
    assert await store.get_rollout_by_id("ro-1") is not None
    assert await store.delete_rollouts(["ro-1", "ro-1", "ro-9"]) == 1
    assert await store.get_rollout_by_id("ro-1") is None
    assert await store.get_trajectories(["ro-1"]) == {}
    with pytest.raises(NotFound):
        await store.query_attempts("ro-1")
    assert [(each.cursor, each.rollout_id) for each in await store.read_completions()] == [(2, "ro-2")]
    assert (await store.statistics())["attempts"] == 0
    again = await store.enqueue_rollout(None, rollout_id="ro-1")
    assert again.status is RolloutStatus.QUEUING
    await store.cancel_rollouts(["ro-1"], "enough")
    assert [each.cursor for each in await store.read_completions()] == [2, 3]


async def test_a_released_trajectory_is_gone_and_all_else_about_its_rollout_stays(store: Store) -> None:
    for number in range(4):
        await store.enqueue_rollout({"task": number}, rollout_id=f"ro-{number}")
    for number, status in enumerate(("succeeded", "succeeded", "failed")):
        claimed = await store.dequeue_rollout("worker-0")
        assert claimed is not None
        await store.update_rollout(f"ro-{number}", config=RolloutConfig(max_attempts=1))
        await store.update_attempt(
            f"ro-{number}", claimed.attempt.attempt_id, status=status, trajectory=b"x" * 20_000
        )
    log, events = await store.read_completions(), await store.read_events()
    before = await store.query_rollouts()
    assert await store.release_trajectories(["ro-0", "ro-0", "ro-2", "ro-3", "ro-9"]) == 1
    assert await store.release_trajectories(["ro-0"]) == 0
    assert await store.release_trajectories([]) == 0
    kept = await store.get_trajectories(["ro-0", "ro-1", "ro-2"], failed=True)
    assert kept == {"ro-1": b"x" * 20_000, "ro-2": b"x" * 20_000}
    assert list(await store.query_rollouts()) == list(before)
    assert await store.read_completions() == log
    assert await store.read_events() == events
    assert complaints(events, log) == []
    assert await store.delete_rollouts(["ro-0", "ro-1"]) == 2


async def test_retention_forgets_what_ended_long_ago(store: Store, advance: Advance) -> None:
    for number in range(4):
        await store.enqueue_rollout(None, rollout_id=f"ro-{number}")
    for number in range(3):
        await store.cancel_rollouts([f"ro-{number}"], "enough")
        await advance(100)
    assert await store.delete_finished(older_than=250, limit=5) == 1
    assert await store.delete_finished(older_than=50, limit=1) == 1
    assert [each.rollout_id for each in await store.query_rollouts()] == ["ro-2", "ro-3"]
    assert await store.delete_finished(older_than=50) == 1
    assert await store.delete_finished(older_than=0) == 0
    assert (await store.statistics())["completions"] == 3


async def test_forgotten_rollouts_leave_no_events_behind(store: Store, advance: Advance) -> None:
    for number in range(3):
        await store.enqueue_rollout(None, rollout_id=f"ro-{number}")
        await advance(10)
        await store.cancel_rollouts([f"ro-{number}"], "enough")
        await advance(10)
    await store.delete_rollouts(["ro-0"])
    events = await store.read_events()
    assert events[0].rollout_id == "ro-1"
    assert complaints(events, await store.read_completions()) == []
    assert await store.delete_finished(older_than=5) == 2
    await store.enqueue_rollout(None, rollout_id="ro-3")
    await advance(10)
    await store.cancel_rollouts(["ro-3"], "enough")
    await store.delete_rollouts(["ro-3"])
    left = await store.read_events()
    assert [(each.kind, each.rollout_id) for each in left] == [("ended", "ro-3"), ("deleted", "ro-3")]


async def test_resources_keep_their_versions(store: Store) -> None:
    assert await store.get_latest_resources() is None
    first = await store.add_resources({"model": "a"}, resources_id="rs-1")
    assert (first.version, first.resources) == (1, {"model": "a"})
    assert await store.add_resources({"model": "a"}, resources_id="rs-1") == first
    with pytest.raises(StoreError, match="exist already"):
        await store.add_resources({"model": "b"}, resources_id="rs-1")
    second = await store.update_resources("rs-1", {"model": "b"})
    assert second.version == 2
    assert await store.update_resources("rs-1", {"model": "b"}) == second
    assert await store.get_resources_by_id("rs-1") == second
    old = await store.get_resources_by_id("rs-1", version=1)
    assert old is not None
    assert old.resources == {"model": "a"}
    assert await store.get_resources_by_id("rs-1", version=3) is None
    assert await store.get_resources_by_id("rs-9") is None
    with pytest.raises(NotFound):
        await store.update_resources("rs-9", {})
    other = await store.add_resources({}, resources_id="other")
    assert await store.get_latest_resources() == other
    await store.update_resources("rs-1", {"model": "c"})
    latest = await store.get_latest_resources()
    assert latest is not None
    assert (latest.resources_id, latest.version) == ("rs-1", 3)
    page = await store.query_resources(limit=1)
    assert ([each.resources_id for each in page], page.total) == (["other"], 2)
    [only] = await store.query_resources(resources_id_contains="rs")
    assert only.version == 3
    rollout = await store.enqueue_rollout(None, resources_id="rs-1")
    assert rollout.resources_id == "rs-1"
    with pytest.raises(NotFound):
        await store.enqueue_rollout(None, resources_id="rs-9")
    with pytest.raises(NotFound):
        await store.update_rollout(rollout.rollout_id, resources_id="rs-9")


async def test_the_history_tells_what_happened(store: Store, advance: Advance) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-1")
    first = await store.dequeue_rollout("worker-0")
    assert first is not None
    await advance(1000)
    second = await store.dequeue_rollout("worker-1")
    assert second is not None
    with pytest.raises(AttemptRefused):
        await store.update_attempt("ro-1", first.attempt.attempt_id, status="succeeded")
    await store.update_attempt("ro-1", second.attempt.attempt_id, status="succeeded")
    events = await store.read_events()
    assert await store.read_events(limit=2) == events[:2]
    await store.delete_rollouts(["ro-1"])
    events += await store.read_events(events[-1].sequence)
    assert [(each.kind, each.status, each.becomes) for each in events] == [
        (EventKind.ENQUEUED, None, None),
        (EventKind.CLAIMED, None, None),
        (EventKind.ENDED, "unresponsive", "requeuing"),
        (EventKind.CLAIMED, None, None),
        (EventKind.REFUSED, "succeeded", None),
        (EventKind.ENDED, "succeeded", "succeeded"),
        (EventKind.DELETED, None, None),
    ]
    assert events[4].attempt_id == first.attempt.attempt_id
    assert [each.sequence for each in events] == sorted({each.sequence for each in events})
    assert await store.read_events(events[-2].sequence) == events[-1:]


async def test_a_closed_store_says_so(store: Store) -> None:
    await store.close()
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.enqueue_rollout(None)
