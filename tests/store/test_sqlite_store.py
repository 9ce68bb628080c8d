"""What is particular to a SQLite file: its settings, its schema, its clock, and several stores on one file."""

import asyncio
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from rollwright.store.contract import StoreError
from rollwright.store.records import EnqueueRequest, RolloutConfig, RolloutStatus
from rollwright.store.sql import SqlStore, changes, looking, queueing, reporting
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


async def test_the_writer_flushes_what_must_last_and_only_that(tmp_path: Path) -> None:
    driver = await SqliteDriver.open(tmp_path / "store.db")
    flushed: list[int] = []

    def said(statement: str) -> None:
        if statement == "BEGIN IMMEDIATE":
            flushed.append(driver._writer._connection.execute("PRAGMA synchronous").fetchone()[0])

    driver._writer._connection.set_trace_callback(said)
    store = SqlStore(driver)
    store._watch.cancel()  # it writes too, whenever the machine gets to it
    await asyncio.gather(store._watch, return_exceptions=True)
    for _ in range(2):
        flushed.clear()
        rollout = await store.enqueue_rollout(None)
        claimed = await store.dequeue_rollout("worker-0")
        assert claimed is not None
        pair = (rollout.rollout_id, claimed.attempt.attempt_id)
        await store.update_worker("worker-0", attempts=[pair])
        await store.append_journal(*pair, [b"turn"])
        await store.update_attempt(*pair, status="succeeded")
        full, normal = 2, 1
        assert flushed == [full, normal, normal, full, full]
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

    assert "USING INDEX rollouts_waiting" in plan(queueing.CLAIM)
    assert "USING INDEX rollouts_claim" in plan(queueing.CLAIMED)
    assert "USING INDEX rollouts_lease (lease_expires<?)" in plan(changes.LAPSED)
    assert "USING INDEX rollouts_lease" in plan(looking.FIRST_LEASE)
    assert "USING INDEX rollouts_worker" in plan(reporting.EXTEND_ALL)
    assert "USING INDEX attempts_taken" in plan(looking.UNTOLD)
    for hot in (queueing.CLAIM, reporting.FIND, reporting.ALIVE, reporting.EXTEND, changes.RELEASE):
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
