"""What SQLite is asked to do, counted: the same however many rollouts there are, and less for callers together."""

import asyncio
import sqlite3
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollwright.store.checks import check_request
from rollwright.store.errors import AttemptRefused
from rollwright.store.records import AttemptStatus, EnqueueRequest, RolloutConfig
from rollwright.store.sql import SqlStore, attempts, changes, claims, queries, queue, retention, sqlite_writer
from rollwright.store.sql.sqlite import SqliteDriver
from rollwright.store.sql.sqlite_file import LOG_BYTES, connect, prepare
from rollwright.store.sql.sqlite_thread import drive
from rollwright.store.sql.statements import Operation
from rollwright.store.sql.transaction import Stamps, Transaction

CONFIG = RolloutConfig(unresponsive_seconds=3600)


async def end_watch(store: SqlStore) -> None:
    """It writes too, whenever the machine gets to it."""
    store._watch.cancel()
    await asyncio.gather(store._watch, return_exceptions=True)


def filled(path: Path, held: int) -> sqlite3.Connection:
    """A store with so many rollouts held by others and as many waiting."""
    prepare(path)
    connection = connect(path, time.time)
    requests = [check_request(EnqueueRequest(None, config=CONFIG)) for _ in range(2 * held)]
    run(connection, lambda tx: queue.enqueue_many(tx, [requests]))
    run(connection, lambda tx: claims.claim(tx, held, "background", None))
    return connection


def run(connection: sqlite3.Connection, make: Callable[[Transaction], Operation[Any]]) -> Any:
    connection.execute("BEGIN IMMEDIATE")
    tx = Transaction(time.time(), Stamps())
    result = drive(connection.cursor(), make(tx))
    drive(connection.cursor(), tx.write_gathered())
    connection.execute("COMMIT")
    return result


def steps(connection: sqlite3.Connection, make: Callable[[Transaction], Operation[Any]]) -> tuple[int, Any]:
    """How many instructions SQLite's virtual machine runs for it."""
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return 0

    connection.set_progress_handler(step, 1)
    result = run(connection, make)
    connection.set_progress_handler(None, 1)
    return count, result


def test_the_health_check_and_every_call_of_a_worker_cost_the_same_among_many_rollouts(
    tmp_path: Path,
) -> None:
    costs = []
    for held in (50, 5000):
        connection = filled(tmp_path / f"{held}.db", held)
        cost: dict[str, int] = {}
        cost["health check"], _ = steps(connection, changes.expire)
        cost["next lease"], _ = steps(connection, lambda tx: queries.first_lease())
        cost["claim"], [mine] = steps(connection, lambda tx: claims.claim(tx, 1, "w", None))
        cost["claims"], _ = steps(connection, lambda tx: claims.claim_many(tx, [(1, "w", None)] * 2))
        pair = (mine.rollout_id, mine.attempt.attempt_id)
        cost["heartbeat"], _ = steps(
            connection, lambda tx, pair=pair: attempts.heartbeat(tx, "w", None, [pair])
        )
        cost["report"], _ = steps(
            connection,
            lambda tx, pair=pair: attempts.report(
                tx, attempts.Report(*pair, AttemptStatus.SUCCEEDED, trajectory=b"t")
            ),
        )
        connection.close()
        costs.append(cost)
    few, many = costs
    assert few["health check"] > 0
    assert few == many


def test_the_oldest_finished_rollouts_are_deleted_at_the_same_cost_among_many(tmp_path: Path) -> None:
    costs = []
    for finished in (2_000, 8_000):
        connection = filled(tmp_path / f"{finished}.db", finished)
        held = connection.execute("SELECT rollout_id FROM rollouts WHERE status = 'preparing'").fetchall()
        reports = [attempts.Report(name, "latest", AttemptStatus.SUCCEEDED) for (name,) in held]
        run(connection, lambda tx, reports=reports: attempts.report_many(tx, reports))
        run(connection, lambda tx: retention.delete_finished(tx, -1.0, 10))
        cost, deleted = steps(connection, lambda tx: retention.delete_finished(tx, -1.0, 10))
        assert deleted == 10
        costs.append(cost)
        connection.close()
    assert costs[1] < 1.5 * costs[0], costs


async def test_old_events_are_deleted_with_their_rollouts_however_many(tmp_path: Path) -> None:
    store = SqlStore(await SqliteDriver.open(tmp_path / "store.db"))
    count = retention.EVENTS_PAGE  # three events for each: several pages of them
    await store.enqueue_many_rollouts([EnqueueRequest(None) for _ in range(count)])
    claimed = await store.dequeue_many_rollouts(count, "worker")
    ends = (
        store.update_attempt(each.rollout_id, each.attempt.attempt_id, status="succeeded") for each in claimed
    )
    await asyncio.gather(*ends)
    assert await store.delete_finished(older_than=0.0, limit=count) == count
    assert {each.kind.value for each in await store.read_events(limit=10 * count)} == {"deleted"}
    await store.close()


async def test_callers_together_need_fewer_statements_than_one_after_the_other(tmp_path: Path) -> None:
    said: list[str] = []
    driver = await SqliteDriver.open(tmp_path / "store.db")
    driver._writer._connection.set_trace_callback(said.append)
    store = SqlStore(driver)
    await end_watch(store)

    async def statements(*calls: Any) -> int:
        said.clear()
        await asyncio.gather(*calls)
        return len([each for each in said if not each.startswith("--")])

    await store.enqueue_many_rollouts([EnqueueRequest(n) for n in range(20)])
    one = await statements(store.dequeue_rollout("worker-0"))
    four = await statements(*(store.dequeue_rollout(f"worker-{n}") for n in range(4)))
    assert four < 4 * one
    commits = [each for each in said if each == "COMMIT"]
    assert len(commits) == 1, "they share a transaction, and with it a flush to disk"
    await store.close()


async def test_only_what_must_last_waits_for_the_writer_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And four rollouts that are played at the same time are flushed to disk twice: enqueued, finished."""
    said: list[tuple[str, str]] = []
    here = threading.current_thread().name
    driver = await SqliteDriver.open(tmp_path / "store.db")
    store = SqlStore(driver)
    await end_watch(store)
    driver._writer._connection.set_trace_callback(
        lambda statement: said.append((threading.current_thread().name, statement))
    )
    monkeypatch.setattr(
        sqlite_writer, "flush", lambda file: said.append((threading.current_thread().name, "flush"))
    )
    monkeypatch.setattr(sqlite_writer, "IDLE_SHARE", 0.0)  # as if the event loop always had more to do
    await asyncio.gather(*(store.enqueue_rollout(n) for n in range(4)))
    found = await asyncio.gather(*(store.dequeue_rollout(f"worker-{n}") for n in range(4)))
    pairs = [(each.rollout_id, each.attempt.attempt_id) for each in found if each]
    await asyncio.gather(*(store.update_worker(f"worker-{n}", attempts=[pairs[n]]) for n in range(4)))
    await asyncio.gather(*(store.update_attempt(*pair, status="succeeded") for pair in pairs))
    assert [thread for thread, statement in said if statement == "BEGIN IMMEDIATE"] == [here] * 3, (
        "the heartbeats write nothing, and what they ask is known"
    )
    left = [(thread, statement) for thread, statement in said if thread != here]
    assert left == [("store.db writer", "flush")] * 2
    await store.close()


def pages_in_log(path: Path) -> int:
    """As SQLite's index of the log counts them, in the header that every process shares."""
    [count] = struct.unpack_from("=I", path.with_name(f"{path.name}-shm").read_bytes(), 16)
    return int(count)


async def test_few_pages_are_written_for_four_rollouts_of_four_callers(tmp_path: Path) -> None:
    """Each page is copied and flushed, so they are most of what a rollout costs."""
    path, rounds = tmp_path / "store.db", 60
    store = SqlStore(await SqliteDriver.open(path, lambda: 1000.0))  # all in one moment
    await end_watch(store)
    written = {"enqueue": 0, "claim": 0, "heartbeat": 0, "finish": 0}

    async def count(name: str, *calls: Any) -> list[Any]:
        before = pages_in_log(path)
        found = await asyncio.gather(*calls)
        written[name] += pages_in_log(path) - before
        return found

    for number in range(rounds):
        await count("enqueue", *(store.enqueue_rollout({"n": number}) for _ in range(4)))
        claimed = await count("claim", *(store.dequeue_rollout(f"worker-{n}") for n in range(4)))
        pairs = [(each.rollout_id, each.attempt.attempt_id) for each in claimed]
        await count("heartbeat", *(store.update_worker(f"worker-{n}", attempts=[pairs[n]]) for n in range(4)))
        await count(
            "finish",
            *(store.update_attempt(*pair, status="succeeded", trajectory=bytes(1024)) for pair in pairs),
        )
    assert written["heartbeat"] == 0
    assert written["enqueue"] / rounds < 7
    assert written["claim"] / rounds < 7.5
    assert written["finish"] / rounds < 12.5, "among them four for the trajectories"
    await store.close()


async def test_a_heartbeat_of_the_same_moment_writes_nothing(tmp_path: Path) -> None:
    now = 1000.0
    driver = await SqliteDriver.open(tmp_path / "store.db", lambda: now)
    connection, store = driver._writer._connection, SqlStore(driver)
    await end_watch(store)
    claimed = await store.start_rollout(None, worker_id="w", config=RolloutConfig(unresponsive_seconds=100))
    pair = (claimed.rollout_id, claimed.attempt.attempt_id)
    for later, written in ((0.9, 0), (0.2, 1), (0.9, 0)):
        now += later
        await store.query_workers()  # so that no stamp of the worker is due
        before = connection.total_changes
        assert await store.update_worker("w", attempts=[pair]) == []
        assert connection.total_changes - before == written
    await store.close()


async def test_a_turn_that_follows_soon_writes_nothing_but_itself(tmp_path: Path) -> None:
    now = 1000.0
    driver = await SqliteDriver.open(tmp_path / "store.db", lambda: now)
    connection, store = driver._writer._connection, SqlStore(driver)
    await end_watch(store)
    claimed = await store.start_rollout(None, worker_id="w", config=RolloutConfig(unresponsive_seconds=100))
    pair = (claimed.rollout_id, claimed.attempt.attempt_id)
    rows = ((0.1, 2), (0.9, 1), (0.05, 1), (0.1, 2), (0.1, 1))  # the first and the fourth: heard of, too
    for number, (later, written) in enumerate(rows):
        now += later
        await store.query_workers()  # so that no stamp of the worker is due
        before = connection.total_changes
        await store.append_journal(*pair, [bytes([number])])
        assert connection.total_changes - before == written
    assert await store.read_journal(claimed.rollout_id) == [bytes([number]) for number in range(5)]
    [attempt] = await store.query_attempts(claimed.rollout_id)
    assert (attempt.status, attempt.lease_expires) == (AttemptStatus.RUNNING, pytest.approx(1101.15))
    now += 100.0
    with pytest.raises(AttemptRefused):
        await store.append_journal(*pair, [b"too late"])
    again = await store.dequeue_rollout("w")
    assert again is not None
    with pytest.raises(AttemptRefused):
        await store.append_journal(*pair, [b"too late"])
    await store.update_attempt(again.rollout_id, again.attempt.attempt_id, status="succeeded")
    assert connection.execute("SELECT count(*) FROM journal").fetchone() == (0,)
    await store.close()


async def test_turns_of_several_callers_share_statements_and_a_refused_one_harms_no_other(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    driver = await SqliteDriver.open(tmp_path / "store.db")
    store = SqlStore(driver)
    await end_watch(store)
    held = [await store.start_rollout(n, worker_id="w") for n in range(4)]
    pairs = [(each.rollout_id, each.attempt.attempt_id) for each in held]
    for pair in pairs:
        await store.append_journal(*pair, [b"first"])
    await store.update_attempt(*pairs[2], status="failed")
    driver._writer._connection.set_trace_callback(said.append)
    answers = await asyncio.gather(
        *(store.append_journal(*pair, [b"second"]) for pair in [*pairs, pairs[0]]),
        return_exceptions=True,
    )
    assert [type(each) for each in answers if each is not None] == [AttemptRefused]
    assert isinstance(answers[2], AttemptRefused)
    journals = [await store.read_journal(rollout_id) for rollout_id, _ in (pairs[0], pairs[1], pairs[3])]
    assert journals == [[b"first", b"second", b"second"], [b"first", b"second"], [b"first", b"second"]]
    assert (
        len([each for each in said if each.startswith("SELECT rollouts.place, rollouts.rollout_id, ")]) == 2
    ), "one for all, one for the refused"
    assert not [each for each in said if each.startswith("UPDATE rollouts")]
    await store.close()


async def test_the_journal_of_a_rollout_that_ends_is_cleared(tmp_path: Path) -> None:
    driver = await SqliteDriver.open(tmp_path / "store.db")
    store = SqlStore(driver)
    for withdrawn in (True, False):
        claimed = await store.start_rollout(None, worker_id="w")
        pair = (claimed.rollout_id, claimed.attempt.attempt_id)
        for _ in range(3):
            await store.append_journal(*pair, [b"turn"])
        if withdrawn:
            await store.cancel_rollouts([claimed.rollout_id], "not needed")
        else:
            await store.update_attempt(*pair, status="succeeded")
        assert driver._writer._connection.execute("SELECT count(*) FROM journal").fetchone() == (0,)
    await store.close()


async def test_the_log_has_its_length_from_the_beginning_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush that makes a file longer costs twice as much."""
    monkeypatch.setattr(sqlite_writer, "CHECKPOINT_PAGES", 20)
    monkeypatch.setattr(sqlite_writer, "LOOP_COMMITS", 3)
    store, log = SqlStore(await SqliteDriver.open(tmp_path / "store.db")), tmp_path / "store.db-wal"
    length = log.stat().st_size
    assert length >= LOG_BYTES
    assert log.stat().st_blocks * 512 >= LOG_BYTES, "no holes"
    for number in range(40):
        await store.enqueue_rollout(number)
    connection = connect(tmp_path / "store.db", time.time)
    [_, frames, _] = connection.execute("PRAGMA wal_checkpoint").fetchone()
    connection.close()
    assert frames < 40, "checkpoints start it again from its beginning"
    assert log.stat().st_size == length
    await store.close()


def test_a_transaction_that_is_run_again_enqueues_and_claims_nothing_twice(tmp_path: Path) -> None:
    """As on PostgreSQL, when a connection broke and nobody knows whether its commit came through."""
    connection = filled(tmp_path / "store.db", 2)
    requests = [[check_request(EnqueueRequest(n))] for n in range(2)]
    asks = [(1, f"w{n}", f"claim-{n}") for n in range(2)]

    def work(tx: Transaction) -> Operation[Any]:
        enqueued = yield from queue.enqueue_many(tx, requests)
        claimed = yield from claims.claim_many(tx, asks)
        return enqueued, claimed

    def again(tx: Transaction) -> Operation[Any]:
        tx.repeated = True
        return (yield from work(tx))

    (enqueued, claimed), (enqueued_again, claimed_again) = run(connection, work), run(connection, again)
    assert [each.rollout_id for [each] in enqueued] == [each.rollout_id for [each] in enqueued_again]
    assert [each.attempt for [each] in claimed] == [each.attempt for [each] in claimed_again]
    assert connection.execute("SELECT count(*) FROM rollouts").fetchone() == (6,)
    assert connection.execute("SELECT sum(attempts) FROM rollouts").fetchone() == (4,)
    connection.close()
