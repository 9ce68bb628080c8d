"""A file of an earlier release opens with all that it held, and goes on."""

import sqlite3
from pathlib import Path

import pytest

from rollwright.store.api import Store
from rollwright.store.invariants import complaints
from rollwright.store.opening import open_store
from rollwright.store.records import AttemptStatus, RolloutStatus

DATA = Path(__file__).with_name("data")
"""Dumps of files that the releases made themselves."""


@pytest.fixture(params=["store_0_1_0.sql"])
async def store(tmp_path: Path, request: pytest.FixtureRequest) -> Store:
    connection = sqlite3.connect(tmp_path / "store.db")
    connection.executescript((DATA / request.param).read_text())
    connection.close()
    return await open_store(str(tmp_path / "store.db"))


async def test_an_old_file_has_kept_every_rollout_attempt_trajectory_and_turn(store: Store) -> None:
    rollouts = {each.rollout_id: each for each in await store.query_rollouts()}
    assert [(name, str(each.status)) for name, each in rollouts.items()] == [
        ("ro-0", "succeeded"),
        ("ro-1", "succeeded"),
        ("ro-2", "failed"),
        ("ro-3", "cancelled"),
        ("ro-4", "running"),
        ("ro-5", "preparing"),
        ("ro-6", "queuing"),
        ("ro-7", "queuing"),
        ("ro-8", "cancelled"),
    ]
    assert rollouts["ro-1"].input == {"n": 1}
    assert rollouts["ro-1"].metadata == {"k": 1}
    tried = await store.query_attempts("ro-1")
    assert [(each.sequence_id, str(each.status), each.reason) for each in tried] == [
        (1, "failed", "broken"),
        (2, "failed", "broken"),
        (3, "succeeded", None),
    ]
    assert tried[2].metadata == {"a": 1}
    found = await store.get_trajectories(list(rollouts), failed=True)
    assert found == {"ro-0": b"t0", "ro-1": b"t1", "ro-2": b"t2"}
    assert await store.read_journal("ro-4") == [b"turn 1", b"turn 2"]
    counts = await store.statistics()
    assert (counts["succeeded"], counts["failed"], counts["cancelled"], counts["attempts"]) == (2, 1, 2, 11)
    failed = await store.query_rollouts(status=[RolloutStatus.FAILED, RolloutStatus.CANCELLED])
    assert [each.rollout_id for each in failed] == ["ro-2", "ro-3", "ro-8"]
    assert len(await store.wait_for_cancellations("w-1", timeout=0)) == 1, "it has not been told yet"
    resources = await store.get_resources_by_id("rs")
    assert resources is not None
    assert resources.resources == {"model": "a"}
    await store.close()


async def test_an_old_file_goes_on_where_it_was_left(store: Store) -> None:
    before = await store.read_completions()
    assert [each.cursor for each in before] == [1, 2, 3, 4, 5]
    running = await store.get_latest_attempt("ro-4")
    again = await store.get_latest_attempt("ro-5")
    assert running is not None
    assert again is not None
    assert again.sequence_id == 2
    await store.update_attempt("ro-4", running.attempt_id, status="succeeded", trajectory=b"t4")
    await store.update_attempt("ro-5", again.attempt_id, status="succeeded", trajectory=b"t5")
    assert [each.status for each in await store.query_attempts("ro-5")] == [
        AttemptStatus.FAILED,
        AttemptStatus.SUCCEEDED,
    ]
    claimed = await store.dequeue_rollout("w-9")
    assert claimed is not None
    assert claimed.rollout_id == "ro-6"
    after = await store.read_completions(after=5)
    assert [each.cursor for each in after] == [7, 8], "6 was given to a rollout that is deleted"
    assert complaints(await store.read_events(), await store.read_completions()) == []
    await store.close()


async def test_the_cursor_of_a_deleted_rollout_is_not_given_again(tmp_path: Path) -> None:
    path = str(tmp_path / "store.db")
    for cursor in (1, 2, 3):
        store = await open_store(path)
        started = await store.start_rollout(None, worker_id="w")
        await store.update_attempt(started.rollout_id, started.attempt.attempt_id, status="succeeded")
        assert [each.cursor for each in await store.read_completions(after=cursor - 1)] == [cursor]
        assert (await store.statistics())["completions"] == cursor
        await store.delete_rollouts([started.rollout_id])
        assert (await store.statistics())["completions"] == cursor
        await store.close()
