"""A damaged SQLite file: every call is answered or refused in one line that names the file, and none waits for ever."""

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollwright import rng
from rollwright.errors import RollwrightError
from rollwright.store.api import Store
from rollwright.store.errors import StoreDamaged, StoreError, StoreUnavailable
from rollwright.store.opening import open_store
from rollwright.store.records import EnqueueRequest, RolloutConfig
from rollwright.store.sql import SqlStore
from rollwright.store.sql.sqlite import SqliteDriver

PATIENCE = 120.0
"""Seconds for a call that takes milliseconds: more than a busy machine needs, and an end for one that hangs."""
CASES = int(os.environ.get("DAMAGE_CASES", "16"))
"""Of each kind; more are worth trying after a change to the threads."""

Call = tuple[str, Callable[[], Awaitable[object]]]


async def filled(path: Path) -> Store:
    """Something of everything, most of it copied from the log into the file."""
    store = await open_store(str(path))
    config = RolloutConfig(unresponsive_seconds=600)
    await store.enqueue_many_rollouts(
        [EnqueueRequest({"n": n}, f"ro-{n}", config=config, metadata={"k": "v" * 100}) for n in range(200)]
    )
    for number in range(60):
        claimed = await store.dequeue_rollout(f"w-{number % 3}")
        assert claimed is not None
        pair = (claimed.rollout_id, claimed.attempt.attempt_id)
        await store.append_journal(*pair, [b"turn" * 50])
        if number % 3:
            await store.update_attempt(*pair, status="succeeded", trajectory=bytes(range(256)) * 20)
    await store.add_resources({"a": 1}, resources_id="rs")
    return store


def calls_of(store: Store, attempt_id: str) -> list[Call]:
    """The whole API."""
    late = "ro-0", attempt_id
    return [
        ("enqueue_rollout", lambda: store.enqueue_rollout({"new": True})),
        ("enqueue with an id", lambda: store.enqueue_rollout({"new": True}, rollout_id="ro-7")),
        ("update_rollout", lambda: store.update_rollout("ro-190", metadata={"x": 1}, priority=3)),
        ("dequeue_rollout", lambda: store.dequeue_rollout("w-9")),
        ("dequeue_many_rollouts", lambda: store.dequeue_many_rollouts(40, "w-9", timeout=0.05)),
        ("start_attempt", lambda: store.start_attempt("ro-199", "w-9")),
        ("start_rollout", lambda: store.start_rollout({"new": True}, worker_id="w-9")),
        ("update_worker", lambda: store.update_worker("w-0", heartbeat_stats={"a": 1}, attempts=[late])),
        ("update_worker, all", lambda: store.update_worker("w-0")),
        ("append_journal", lambda: store.append_journal(*late, [b"turn"])),
        ("read_journal", lambda: store.read_journal("ro-0")),
        ("clear_journal", lambda: store.clear_journal(*late)),
        ("update_attempt", lambda: store.update_attempt(*late, status="succeeded", trajectory=b"t")),
        ("wait_for_cancellations", lambda: store.wait_for_cancellations("w-0", timeout=0.05)),
        ("read_completions", lambda: store.read_completions(1000, timeout=0.05)),
        ("get_trajectories", lambda: store.get_trajectories([f"ro-{n}" for n in range(200)], failed=True)),
        ("wait_for_rollouts", lambda: store.wait_for_rollouts(["ro-1", "ro-150"], timeout=0.05)),
        ("get_rollout_by_id", lambda: store.get_rollout_by_id("ro-100")),
        ("get_latest_attempt", lambda: store.get_latest_attempt("ro-1")),
        ("query_rollouts", lambda: store.query_rollouts()),
        ("query_rollouts, final", lambda: store.query_rollouts(status="succeeded", sort_by="end_time")),
        ("query_attempts", lambda: store.query_attempts("ro-1")),
        ("query_workers", lambda: store.query_workers()),
        ("get_worker_by_id", lambda: store.get_worker_by_id("w-1")),
        ("statistics", lambda: store.statistics()),
        ("read_events", lambda: store.read_events()),
        ("add_resources", lambda: store.add_resources({"b": 1})),
        ("update_resources", lambda: store.update_resources("rs", {"a": 2})),
        ("get_resources_by_id", lambda: store.get_resources_by_id("rs")),
        ("get_latest_resources", lambda: store.get_latest_resources()),
        ("query_resources", lambda: store.query_resources()),
        ("cancel_rollouts", lambda: store.cancel_rollouts(["ro-180", "ro-181"], "enough")),
        ("delete_rollouts", lambda: store.delete_rollouts(["ro-1"])),
        ("delete_finished", lambda: store.delete_finished(older_than=0)),
    ]


async def refusals(store: Store, path: Path, calls: list[Call]) -> dict[str, str]:
    """Makes the calls, several at a time, and returns what was refused; nothing else may come of them."""

    async def one(name: str, call: Callable[[], Awaitable[object]]) -> tuple[str, str]:
        try:
            await asyncio.wait_for(call(), PATIENCE)
        except (StoreError, StoreUnavailable) as error:
            return name, str(error)
        except TimeoutError:
            pytest.fail(f"{name} was never answered")
        return name, ""

    found: dict[str, str] = {}
    for first in range(0, len(calls), 3):
        found |= dict(await asyncio.gather(*(one(*each) for each in calls[first : first + 3])))
    driver = store._driver  # type: ignore[attr-defined]
    assert driver._reader._thread._thread.is_alive()
    assert driver._writer._thread._thread.is_alive()
    await asyncio.wait_for(store.close(), PATIENCE)
    assert not [why for why in found.values() if "\n" in why]
    return {name: why for name, why in found.items() if why}


DAMAGE = """
import sys
path, kind, where, seed = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
with open(path, "r+b") as file:
    length = file.seek(0, 2)
    page = int(where * max(1, length // 4096)) * 4096
    if kind == "cut":
        file.truncate(int(where * length))
    elif kind in ("zeros", "garbage"):
        file.seek(page)
        file.write(bytes(4096) if kind == "zeros" else bytes((seed * 31 + n * 7) % 251 for n in range(4096)))
    elif kind == "head":  # of many pages: types, cell counts, pointers
        for each in range(0, length, 4096):
            if (each // 4096 * 2654435761 + seed) % 3 == 0:
                file.seek(each + (100 if each == 0 else 0) + seed % 8)
                file.write(bytes([seed % 256]))
    else:
        for n in range(200):
            file.seek((seed * 7919 + n * n * 104729 + int(where * length)) % max(1, length))
            file.write(bytes([(seed + n) % 256]))
"""
"""In a process of its own: to close a file that SQLite has open gives up the locks of the whole process."""


def damage(path: Path, case: int) -> str:
    kind = ("bytes", "garbage", "zeros", "cut", "head")[case % 5]
    where = rng.uniform("where", case)
    subprocess.run(
        [sys.executable, "-S", "-c", DAMAGE, str(path), kind, str(where), str(case)], check=True, timeout=60
    )
    return kind


async def attempt_of(store: Store) -> str:
    found = await store.get_latest_attempt("ro-0")
    assert found is not None
    return found.attempt_id


@pytest.mark.parametrize("case", range(CASES))
async def test_a_store_that_is_damaged_while_it_is_open_answers_or_refuses_every_call(
    tmp_path: Path, case: int
) -> None:
    path = tmp_path / "store.db"
    store = await filled(path)
    attempt_id = await attempt_of(store)
    with sqlite3.connect(path) as other:  # so that the file, not the log, has it
        other.execute("PRAGMA wal_checkpoint(FULL)")
    other.close()
    damage(tmp_path / ("store.db-wal" if case % 4 == 3 else "store.db"), case)
    refused = await refusals(store, path, calls_of(store, attempt_id))
    for why in refused.values():
        assert str(path) in why or "ro-" in why or "w-" in why or "rs" in why, why


@pytest.mark.parametrize("case", range(CASES))
async def test_a_damaged_store_is_opened_and_answers_or_refuses_every_call(tmp_path: Path, case: int) -> None:
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    store = await filled(tmp_path / "store.db")
    attempt_id = await attempt_of(store)
    for name in ("store.db", "store.db-wal", "store.db-shm"):
        shutil.copy(tmp_path / name, crashed / name)
    await store.close()
    damage(crashed / ("store.db", "store.db-wal", "store.db-shm")[case % 3], case // 3)
    path = crashed / "store.db"
    refusal = ""
    try:
        damaged = await asyncio.wait_for(open_store(str(path)), PATIENCE)
    except RollwrightError as error:
        refusal = str(error)
    if refusal:
        assert str(path) in refusal
        assert "\n" not in refusal
    else:
        await refusals(damaged, path, calls_of(damaged, attempt_id))


async def test_waiting_calls_are_told_of_the_damage(tmp_path: Path) -> None:
    """Not only those that come after it: whoever waited before must not wait for news that nobody can read."""
    path = tmp_path / "store.db"
    store = await open_store(str(path))
    waiting = [
        asyncio.create_task(store.read_completions(timeout=PATIENCE * 10)),
        asyncio.create_task(store.wait_for_cancellations("w-0", timeout=PATIENCE * 10)),
    ]
    await asyncio.sleep(0)
    with sqlite3.connect(path) as other:
        other.execute("DROP TABLE completions")
        other.execute("DROP TABLE attempts")
    other.close()
    for each in waiting:
        with pytest.raises(StoreDamaged, match=r"store\.db is damaged"):
            await asyncio.wait_for(each, PATIENCE)
    await asyncio.wait_for(store.close(), PATIENCE)


@pytest.mark.parametrize("how", ["removed", "replaced", "folder removed", "log removed"])
async def test_a_file_that_is_removed_or_replaced_takes_nothing_more(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "store.db"
    store = await filled(path)
    attempt_id = await attempt_of(store)
    if how == "removed":
        path.unlink()
    elif how == "replaced":
        shutil.copy(path, tmp_path / "copy.db")
        (tmp_path / "copy.db").replace(path)
    elif how == "log removed":
        (folder / "store.db-wal").unlink()
    else:
        shutil.rmtree(folder)
    await asyncio.sleep(0.02)
    refused = await refusals(store, path, calls_of(store, attempt_id))
    assert "enqueue_rollout" in refused
    assert "update_attempt" in refused
    assert all(str(path) in why for why in refused.values())
    if how != "log removed":
        assert len(refused) == len(calls_of(store, attempt_id)), "also whatever only reads"


async def test_a_disk_that_fails_is_told_to_whoever_reads_and_writes(tmp_path: Path) -> None:
    """Also where the transaction cannot even be ended."""
    store = await filled(tmp_path / "store.db")
    attempt_id = await attempt_of(store)
    driver: SqliteDriver = store._driver  # type: ignore[attr-defined]
    for user in (driver._reader, driver._writer):
        user._cursor = FailingCursor(user._cursor)  # type: ignore[union-attr]
        user._connection = FailingConnection(user._connection)  # type: ignore[union-attr]
    calls = calls_of(store, attempt_id)
    refused = await refusals(store, tmp_path / "store.db", calls)
    assert len(refused) == len(calls)
    assert all("store.db" in why for why in refused.values())
    assert [why for why in refused.values() if "store.db: disk I/O error" in why]


def failure() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR  # type: ignore[misc]
    return error


class FailingCursor:
    def __init__(self, real: sqlite3.Cursor) -> None:
        self._real = real

    def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
        if sql in ("BEGIN", "BEGIN IMMEDIATE"):
            return self._real.execute(sql)
        raise failure()

    def executemany(self, *call: object) -> None:
        raise failure()


class FailingConnection:
    in_transaction = True

    def __init__(self, real: sqlite3.Connection) -> None:
        self._real = real

    def execute(self, *call: object) -> None:
        raise failure()

    def executescript(self, script: str) -> None:
        self._real.rollback()

    def close(self) -> None:
        self._real.close()


async def test_a_failure_that_nobody_thought_of_reaches_the_caller_and_the_next_call_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqlStore(await SqliteDriver.open(tmp_path / "store.db"))

    class Odd(BaseException):
        pass

    def odd(*_: object) -> None:
        raise Odd("not even an Exception")

    driver = store._driver
    calls = [
        (driver._reader, "_read_each", store.statistics),  # type: ignore[attr-defined]
        (driver._writer, "_run_in_thread", lambda: store.cancel_rollouts([], "none")),  # type: ignore[attr-defined]
    ]
    for owner, name, call in calls:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, odd)
            for _ in range(2):
                with pytest.raises(StoreDamaged, match=r"store\.db holds what cannot be read: Odd"):
                    await asyncio.wait_for(call(), PATIENCE)
    assert (await store.statistics())["queuing"] == 0, "and the threads go on"
    await store.cancel_rollouts([], "none")
    await store.close()


async def test_leases_that_cannot_be_ended_hold_up_nobody(tmp_path: Path) -> None:
    """An index that says something else than its table: the lease is over, and ending it does not change that."""
    now = 1000.0
    path = tmp_path / "store.db"
    store = SqlStore(await SqliteDriver.open(path, lambda: now))
    for number in range(3):
        await store.start_rollout(number, worker_id="w", config=RolloutConfig(unresponsive_seconds=10))
    await store.close()
    for step in (
        "CREATE TABLE aside AS SELECT * FROM sqlite_master WHERE name = 'rollouts_lease'",
        "DELETE FROM sqlite_master WHERE name = 'rollouts_lease'",
        "UPDATE rollouts SET lease_expires = 5000",  # which the index does not learn
        "INSERT INTO sqlite_master SELECT * FROM aside",
    ):
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("PRAGMA writable_schema=ON")
        other.execute(step)
        other.close()
    now += 100
    again = SqlStore(await SqliteDriver.open(path, lambda: now))
    refused = await refusals(
        again, path, [("statistics", again.statistics), ("claim", again.dequeue_rollout)]
    )
    assert set(refused) == {"statistics", "claim"}
    assert all("store.db" in why for why in refused.values())
