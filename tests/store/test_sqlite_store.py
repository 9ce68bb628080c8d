"""What is particular to a SQLite file: its settings, its schema, its clock, and several stores on one file."""

import asyncio
import errno
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable
from math import inf
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from rollwright.store.errors import NotFound, StoreError, StoreUnavailable
from rollwright.store.invariants import complaints
from rollwright.store.records import EnqueueRequest, RolloutConfig, RolloutStatus
from rollwright.store.sql import SqlStore, attempts, changes, claims, queries, sqlite_writer
from rollwright.store.sql.schema import metadata
from rollwright.store.sql.sqlite import SqliteDriver
from rollwright.store.sql.sqlite_file import connect, prepare
from rollwright.store.sql.statements import Statement


async def opened(path: Path) -> SqlStore:
    return SqlStore(await SqliteDriver.open(path))


def test_a_lasting_commit_survives_a_power_cut(tmp_path: Path) -> None:
    connection = connect(tmp_path / "store.db", time.time)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"
    connection.close()


async def quiet(path: Path) -> SqlStore:
    """One whose watch does not write, whenever the machine gets to it."""
    store = await opened(path)
    store._watch.cancel()
    await asyncio.gather(store._watch, return_exceptions=True)
    return store


@pytest.mark.parametrize("brief", [True, False], ids=["in the event loop", "in the thread"])
async def test_the_writer_flushes_what_must_last_and_only_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brief: bool
) -> None:
    if not brief:
        monkeypatch.setattr(sqlite_writer, "LOOP_COMMITS", 0)
    store = await quiet(tmp_path / "store.db")
    writer = store._driver._writer  # type: ignore[attr-defined]
    flushes: list[str] = []

    def said(statement: str) -> None:
        if statement == "COMMIT" and writer._connection.execute("PRAGMA synchronous").fetchone() == (2,):
            flushes.append("FULL")

    def flushed(file: int) -> None:
        flushes.append("flush")
        os.fsync(file)

    writer._connection.set_trace_callback(said)
    monkeypatch.setattr(sqlite_writer, "flush", flushed)

    async def flushed_by(call: Awaitable[Any]) -> list[str]:
        flushes.clear()
        await call
        return flushes.copy()

    once = ["flush"] if brief else ["FULL"]
    for _ in range(2):
        assert await flushed_by(store.enqueue_rollout(None)) == once
        assert await flushed_by(store.enqueue_rollout(None)) == once
        claim = asyncio.ensure_future(store.dequeue_rollout("worker-0"))
        assert await flushed_by(claim) == []
        claimed = claim.result()
        assert claimed is not None
        pair = (claimed.rollout_id, claimed.attempt.attempt_id)
        assert await flushed_by(store.update_worker("worker-0", attempts=[pair])) == []
        assert await flushed_by(store.append_journal(*pair, [b"turn"])) == once
        assert await flushed_by(store.update_attempt(*pair, status="succeeded")) == once
    await store.close()


async def test_what_was_answered_is_on_the_disk_as_it_was_last_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut at the very moment after an answer."""
    disk = tmp_path / "disk"

    def flushed(file: int) -> None:
        os.fsync(file)
        shutil.rmtree(disk, ignore_errors=True)
        disk.mkdir()
        for name in ("store.db", "store.db-wal"):
            shutil.copy(tmp_path / name, disk / name)

    monkeypatch.setattr(sqlite_writer, "flush", flushed)
    store = await quiet(tmp_path / "store.db")
    for number in range(5):
        await store.enqueue_rollout(number, rollout_id=f"ro-{number}")  # an id of one's own: not brief
        await asyncio.gather(*(store.enqueue_rollout(number) for _ in range(3)))
        claimed = await store.dequeue_rollout("worker-0")
        assert claimed is not None
        pair = (claimed.rollout_id, claimed.attempt.attempt_id)
        await store.append_journal(*pair, [b"turn"])
        after = await opened(disk / "store.db")
        assert len(await after.query_rollouts()) == 4 * (number + 1)
        assert await after.read_journal(claimed.rollout_id) == [b"turn"]
        await after.close()
        await store.update_attempt(*pair, status="succeeded", trajectory=b"x")
        after = await opened(disk / "store.db")
        assert await after.get_trajectories([claimed.rollout_id]) == {claimed.rollout_id: b"x"}
        await after.close()
    await store.close()


async def test_a_power_cut_takes_back_only_claims_that_nothing_durable_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"

    def flushed(file: int) -> None:
        os.fsync(file)
        shutil.rmtree(disk, ignore_errors=True)
        disk.mkdir()
        for name in ("store.db", "store.db-wal"):
            shutil.copy(tmp_path / name, disk / name)

    monkeypatch.setattr(sqlite_writer, "flush", flushed)
    store = await quiet(tmp_path / "store.db")
    await asyncio.gather(*(store.enqueue_rollout(number) for number in range(3)))
    journalled = await store.dequeue_rollout("worker-0")
    claimed = await store.dequeue_rollout("worker-0")
    assert journalled is not None
    assert claimed is not None
    await store.append_journal(journalled.rollout_id, journalled.attempt.attempt_id, [b"turn"])
    late = await store.dequeue_rollout("worker-0")
    assert late is not None

    monkeypatch.undo()  # the disk stays as it is now
    after = await opened(disk / "store.db")
    for kept in (journalled, claimed):  # the flush of the turn brought every earlier commit to the disk
        latest = await after.get_latest_attempt(kept.rollout_id)
        assert latest is not None
        assert latest.attempt_id == kept.attempt.attempt_id
    lost = (late.rollout_id, late.attempt.attempt_id)
    assert await after.update_worker("worker-0", attempts=[lost]) == [lost]
    with pytest.raises(NotFound, match="has no attempt"):
        await after.update_attempt(*lost, status="succeeded")
    again = await after.dequeue_rollout("worker-1")
    assert again is not None
    assert again.rollout_id == late.rollout_id
    assert again.attempt.sequence_id == 1, "the lost claim costs no try"
    for each in (journalled, claimed, again):
        await after.update_attempt(each.rollout_id, each.attempt.attempt_id, status="succeeded")
    assert complaints(await after.read_events(), await after.read_completions()) == []
    await after.close()
    await store.close()


async def test_while_the_disk_is_written_only_what_has_to_last_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_go_on = threading.Event(), threading.Event()
    flushes = 0

    def flushed(file: int) -> None:
        nonlocal flushes
        flushes += 1
        began.set()
        assert may_go_on.wait(60)
        os.fsync(file)

    store = await quiet(tmp_path / "store.db")
    await store.enqueue_rollout("first")
    store._driver._writer._loop_flushes = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(sqlite_writer, "flush", flushed)
    second = asyncio.create_task(store.enqueue_rollout("second"))
    await asyncio.to_thread(began.wait, 60)
    claimed = await store.dequeue_rollout("worker-0")
    assert claimed is not None
    assert claimed.input == "first"
    pair = (claimed.rollout_id, claimed.attempt.attempt_id)
    assert await store.update_worker("worker-0", attempts=[pair]) == []
    looking = asyncio.create_task(store.query_rollouts())
    brief = asyncio.create_task(store.get_trajectories([claimed.rollout_id]))  # read in the event loop
    later = [asyncio.create_task(store.append_journal(*pair, [bytes([n])])) for n in range(3)]
    for _ in range(3):  # the reader's thread answers in its own time
        await asyncio.sleep(0.02)
    assert not second.done(), "it is not on disk"
    assert not looking.done(), "what it has seen is not on disk"
    assert not brief.done()
    assert not any(each.done() for each in later)
    may_go_on.set()
    assert (await second).input == "second"
    assert len(await looking) == 2
    assert await brief == {}
    await asyncio.gather(*later)
    assert await store.read_journal(claimed.rollout_id) == [b"\0", b"\1", b"\2"]
    assert flushes == 2, "what waited for one flush shares the next"
    await store.close()


async def test_a_store_whose_flush_failed_says_so_until_it_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    store = await quiet(tmp_path / "store.db")
    await store.enqueue_rollout("good")
    with monkeypatch.context() as broken:
        broken.setattr(sqlite_writer, "flush", failing)
        with pytest.raises(StoreUnavailable, match=r"store\.db: cannot be flushed.*Input/output error"):
            await store.enqueue_rollout("lost or not")
    for call in (store.enqueue_rollout("too late"), store.dequeue_rollout("worker-0")):
        with pytest.raises(StoreUnavailable, match="open it again"):
            await call
    await store.close()
    again = await opened(tmp_path / "store.db")
    assert "good" in [each.input for each in await again.query_rollouts()]
    await again.enqueue_rollout("good again")
    await again.close()


@pytest.mark.parametrize(
    ("seconds", "worked", "here"),
    [(0.0001, 0.00001, True), (0.0001, 0.00009, False), (0.01, 0.00001, False)],
    ids=["idle", "busy", "slow disk"],
)
def test_the_event_loop_may_wait_for_a_quick_disk_where_it_has_nothing_else_to_do(
    seconds: float, worked: float, here: bool
) -> None:
    assert sqlite_writer.may_flush_in_loop(seconds, worked) == here


async def test_now_and_then_the_thread_waits_for_the_disk_to_see_what_the_event_loop_has_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    here = threading.current_thread()
    idle = True

    def flushed(file: int) -> None:
        threads.append(threading.current_thread() is here)

    monkeypatch.setattr(sqlite_writer, "flush", flushed)
    monkeypatch.setattr(sqlite_writer, "QUICK_FLUSH_SECONDS", inf)
    monkeypatch.setattr(sqlite_writer, "may_flush_in_loop", lambda seconds, worked: idle)
    monkeypatch.setattr(sqlite_writer, "LOOP_FLUSHES", 3)
    store = await quiet(tmp_path / "store.db")

    async def flushed_by(count: int) -> list[bool]:
        threads.clear()
        for _ in range(count):
            await store.enqueue_rollout(None)
        return threads.copy()

    assert await flushed_by(8) == [False, True, True, True, False, True, True, True]
    idle = False
    assert await flushed_by(4) == [False] * 4
    idle = True
    monkeypatch.setattr(sqlite_writer, "QUICK_FLUSH_SECONDS", 0.0)
    assert await flushed_by(4) == [False, True, False, True], "one slow flush, and it is the thread's again"
    await store.close()


async def test_a_store_is_found_again_as_it_was_left(tmp_path: Path) -> None:
    store = await opened(tmp_path / "store.db")
    await store.enqueue_many_rollouts([EnqueueRequest({"n": n}, f"ro-{n}") for n in range(3)])
    done = await store.dequeue_rollout("worker-0")
    held = await store.dequeue_rollout("worker-0")
    assert done is not None
    assert held is not None
    await store.append_journal(held.rollout_id, held.attempt.attempt_id, [b"turn"])
    await store.update_attempt(done.rollout_id, done.attempt.attempt_id, status="succeeded", trajectory=b"x")
    workers = await store.query_workers()
    await store.close()

    again = await opened(tmp_path / "store.db")
    assert [each.status for each in await again.query_rollouts()] == ["succeeded", "running", "queuing"]
    assert await again.get_trajectories(["ro-0"]) == {"ro-0": b"x"}
    assert await again.read_journal("ro-1") == [b"turn"]
    assert list(await again.query_workers()) == list(workers)
    await again.update_attempt("ro-1", held.attempt.attempt_id, status="succeeded")
    assert [each.cursor for each in await again.read_completions()] == [1, 2]
    await again.close()


def test_several_new_files_can_be_opened_at_once_by_one_process(tmp_path: Path) -> None:
    """In a process of its own: what one opening has worked out serves the later ones."""
    program = (
        "import asyncio, sys\n"
        "from rollwright.store.opening import open_store\n"
        "async def main():\n"
        "    stores = await asyncio.gather(*(open_store(f'{sys.argv[1]}/{n}.db') for n in range(8)))\n"
        "    print([(await each.enqueue_rollout('a task')).status for each in stores].count('queuing'))\n"
        "    await asyncio.gather(*(each.close() for each in stores))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("8\n", "")


async def test_two_stores_on_one_file_wake_each_other(tmp_path: Path) -> None:
    here, there = await opened(tmp_path / "store.db"), await opened(tmp_path / "store.db")
    dequeuing = asyncio.create_task(here.dequeue_rollout("worker-0", timeout=30))
    await asyncio.sleep(0.1)
    await there.enqueue_rollout(None, rollout_id="ro-1")
    claimed = await asyncio.wait_for(dequeuing, 10)
    assert claimed is not None
    told = asyncio.create_task(here.wait_for_cancellations("worker-0", timeout=30))
    reading = asyncio.create_task(here.read_completions(timeout=30))
    await asyncio.sleep(0.1)
    await there.cancel_rollouts(["ro-1"], "enough")
    assert await asyncio.wait_for(told, 10) == [("ro-1", claimed.attempt.attempt_id)]
    assert len(await asyncio.wait_for(reading, 10)) == 1
    await here.close()
    await there.close()


async def test_one_call_that_fails_does_not_fail_the_others_in_its_transaction(tmp_path: Path) -> None:
    store = await opened(tmp_path / "store.db")
    good = [store.enqueue_rollout(None, rollout_id=f"ro-{n}") for n in range(20)]
    odd = [store.update_attempt("\ud800", "x"), store.start_attempt("ro-none")]
    results = await asyncio.gather(*good, *odd, return_exceptions=True)
    assert [each.rollout_id for each in results[:20]] == [f"ro-{n}" for n in range(20)]  # type: ignore[union-attr]
    assert all(isinstance(each, StoreError) for each in results[20:]), results[20:]
    assert (await store.statistics())["queuing"] == 20
    await store.close()


async def test_all_processes_have_the_same_time_whatever_the_system_clock_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = prepare(tmp_path / "store.db")
    wall = time.time()
    assert abs(before() - wall) < 60
    for jump in (-7200, 86400):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda jump=jump: wall + jump)
            after = prepare(tmp_path / "store.db")
            assert abs(after() - before()) < 60


async def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await (await opened(path)).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE rollwright_schema SET version_num = '9999'")
    connection.close()
    with pytest.raises(StoreError, match=r"store\.db has schema 9999, which this release does not know"):
        await opened(path)


async def test_what_is_not_a_store_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("no database " * 100)
    for path in (tmp_path / "text.db", tmp_path / "missing" / "store.db"):
        with pytest.raises(StoreError, match="cannot be opened as a store") as refusal:
            await opened(path)
        assert "\n" not in str(refusal.value)


def test_the_migrations_lead_to_the_schema_the_code_uses(tmp_path: Path) -> None:
    prepare(tmp_path / "migrated.db")
    engine = create_engine(f"sqlite:///{tmp_path / 'created.db'}")
    metadata.create_all(engine)
    engine.dispose()
    migrated, created = tables(tmp_path / "migrated.db"), tables(tmp_path / "created.db")
    migrated.pop("rollwright_schema")
    migrated.pop("sqlite_autoindex_rollwright_schema_1")
    assert migrated == created


def tables(path: Path) -> dict[str, str | None]:
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT name, sql FROM sqlite_master").fetchall()
    connection.close()
    return {name: sql and " ".join(sql.split()) for name, sql in rows}


def test_claims_and_the_health_check_search_an_index(tmp_path: Path) -> None:
    prepare(tmp_path / "store.db")
    connection = connect(tmp_path / "store.db", time.time)

    def plan(statement: Statement) -> str:
        sql = statement.sqlite.sql
        rows = connection.execute(f"EXPLAIN QUERY PLAN {sql}", [None] * sql.count("?")).fetchall()
        return "; ".join(row[3] for row in rows)

    assert "USING INDEX rollouts_waiting" in plan(claims.CLAIM)
    assert "USING INDEX rollouts_claim" in plan(claims.CLAIMED)
    assert "USING INDEX rollouts_lease (lease_expires<?)" in plan(changes.LAPSED)
    assert "USING INDEX rollouts_lease" in plan(queries.FIRST_LEASE)
    assert "USING INDEX rollouts_worker" in plan(attempts.EXTEND_ALL)
    assert "USING INDEX attempts_taken" in plan(queries.UNREPORTED)
    for hot in (claims.CLAIM, attempts.FIND, attempts.ALIVE, attempts.EXTEND, changes.RELEASE):
        assert "TEMP B-TREE" not in plan(hot)
        assert "SCAN rollouts;" not in plan(hot) + ";"
    connection.close()


async def test_leases_in_sql_end_when_the_rules_say(tmp_path: Path) -> None:
    now = 1000.0
    store = SqlStore(await SqliteDriver.open(tmp_path / "store.db", lambda: now))
    limits = [None, 5.0, 30.0]
    for timeout in limits:
        for silence in limits:
            config = RolloutConfig(timeout_seconds=timeout, unresponsive_seconds=silence)
            rollout = await store.start_rollout(None, config=config, worker_id="w")
            first = changes.lease_end(config, now, now)
            assert rollout.attempt.lease_expires == first
            start, now = now, now + 4.0
            assert (
                await store.update_worker("w", attempts=[(rollout.rollout_id, rollout.attempt.attempt_id)])
                == []
            )
            attempt = await store.get_latest_attempt(rollout.rollout_id)
            assert attempt is not None
            assert attempt.lease_expires == changes.lease_end(config, start, now)
    await store.close()


async def test_ending_very_many_leases_at_once(tmp_path: Path) -> None:
    now, count = 1000.0, changes.EXPIRY_BATCH * 2 + 1
    store = SqlStore(await SqliteDriver.open(tmp_path / "store.db", lambda: now))
    await store.enqueue_many_rollouts([EnqueueRequest(n) for n in range(count)])
    assert len(await store.dequeue_many_rollouts(count)) == count
    now += 1000
    assert (await store.statistics())[RolloutStatus.REQUEUING] == count
    await store.close()
