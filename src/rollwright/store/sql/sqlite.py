"""SQLite as a driver: one thread writes, one reads, and many callers share each flush to disk.

Calls that write are queued to the writer thread. It takes all that are waiting, runs them in one transaction,
commits (write-ahead log, `synchronous=FULL`: what was committed survives a power cut) and only then answers
them. While it commits, the next calls gather: the busier the store, the more calls share a commit.

Several processes may open the same file. Each transaction begins with the write lock, so they take turns, and
a process that sees another one writing makes a short pause after each commit: SQLite's lock has no queue, and
without the pause the process that just released it would get it again. A change made by another process is
noticed by polling `data_version`, which reads a few bytes of shared memory.
"""

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from sqlalchemy import text

from rollwright.store.contract import StoreError, StoreUnavailable
from rollwright.store.sql.changes import expire
from rollwright.store.sql.driver import Job, Outcome, Read, Write, answer, run_all
from rollwright.store.sql.looking import progress
from rollwright.store.sql.sqlite_file import BUSY_SECONDS, open_file
from rollwright.store.sql.statements import Operation, Statement
from rollwright.store.sql.transaction import Changes, Stamps, Transaction

_log = logging.getLogger(__name__)

MAX_BATCH = 256
"""A transaction with so many calls takes no more: enough to hide the cost of a flush, few enough to answer
within milliseconds."""

_RETRY_SECONDS = 0.0002
"""Pause between two tries to get the write lock; shorter than the courtesy pause, so that it falls into it."""
_COURTESY_SECONDS = 0.0005
_CONTENTION_SECONDS = 1.0
"""For how long after it was last seen writing another process is treated as present."""
_LOOK_SECONDS = 0.01
"""How often to look whether another process writes, or let a lease run out."""

POLL_SECONDS = 0.02
"""How often to look for other processes' changes while somebody waits for one."""
IDLE_POLL_SECONDS = 0.25

Result = TypeVar("Result")


def drive(connection: sqlite3.Connection, operation: Operation[Result]) -> Result:
    """Runs an operation to its end."""
    try:
        statement, values = next(operation)
        while True:
            sql, arguments, returns_rows = statement.sqlite
            rows: list[Any] = []
            if len(values) == 1:
                rows = connection.execute(sql, arguments(values[0])).fetchall()
            elif returns_rows:
                for each in values:
                    rows += connection.execute(sql, arguments(each)).fetchall()
            else:
                connection.executemany(sql, map(arguments, values))
            statement, values = operation.send(rows)
    except StopIteration as stop:
        result: Result = stop.value
        return result


class SqliteDriver:
    """Belongs to the event loop it was opened in."""

    repeats = False

    @classmethod
    async def open(cls, path: Path, clock: Callable[[], float] | None = None) -> "SqliteDriver":
        time_of_store, writer, reader = await asyncio.to_thread(open_file, path, clock)
        return cls(path, time_of_store, writer, reader)

    def __init__(
        self, path: Path, clock: Callable[[], float], writer: sqlite3.Connection, reader: sqlite3.Connection
    ) -> None:
        self._path = path
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._on_change: Callable[[Changes], None] = lambda changes: None
        self._poll: asyncio.Task[None] | None = None
        self._closed = False
        self.stamps = Stamps()
        self._writer = _Thread(f"{path.name} writer", writer, self._write_batch)
        self._reader = _Thread(f"{path.name} reader", reader, self._read_each)
        self._lasting = True
        """Whether commits are flushed to disk now, in the writer's connection."""
        self._next_look = 0.0
        self._next_lapse = 0.0
        """When, by the store's clock, to look for leases that are over."""
        self._seen_version = 0
        self._contended_until = 0.0

    def write(
        self, make: Write[Result], *, lasting: bool, orphaned: Callable[[Result], None] | None = None
    ) -> "asyncio.Future[Result]":
        return self._submit(self._writer, make, lasting, orphaned)

    def read(self, make: Read[Result]) -> "asyncio.Future[Result]":
        return self._submit(self._reader, make)

    def watch(self, on_change: Callable[[Changes], None], waited_for: Callable[[], bool]) -> None:
        self._on_change = on_change
        self._poll = self._loop.create_task(self._look_for_changes(waited_for))

    async def close(self) -> None:
        self._closed = True
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.gather(self._poll, return_exceptions=True)
        for thread in (self._writer, self._reader):
            await asyncio.to_thread(thread.stop)

    def _submit(
        self,
        thread: "_Thread",
        make: Callable[..., Operation[Result]],
        lasting: bool = False,
        orphaned: Callable[[Result], None] | None = None,
    ) -> "asyncio.Future[Result]":
        if self._closed:
            raise StoreError("the store is closed")
        future: asyncio.Future[Result] = self._loop.create_future()
        thread.gather(Job(make, future, lasting, orphaned), self._loop)
        return future

    # -- in the threads -----------------------------------------------------------------------------

    def _write_batch(self, connection: sqlite3.Connection, batch: Sequence[Job[Any]]) -> None:
        changes = Changes()
        try:
            self._begin(connection, lasting=any(job.lasting for job in batch))
            tx = Transaction(self._clock(), self.stamps)
            self._end_leases(connection, tx)
            outcomes = drive(connection, run_all(tx, batch))
            connection.execute("COMMIT")
            changes = tx.changes
            self._next_lapse = min(self._next_lapse, changes.lease)
        except Exception as error:  # noqa: BLE001 - passed on to whoever made the call
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if len(batch) > 1:
                for job in batch:  # so that only the call that fails is told
                    self._write_batch(connection, [job])
                return
            outcomes = [(None, self._plain(error))]
        self._answer(batch, outcomes, changes)
        if time.monotonic() < self._contended_until:
            time.sleep(_COURTESY_SECONDS)

    def _begin(self, connection: sqlite3.Connection, *, lasting: bool) -> None:
        if lasting is not self._lasting:
            # As a script, which is compiled each time: some pragmas take effect when they are compiled.
            connection.executescript(f"PRAGMA synchronous={'FULL' if lasting else 'NORMAL'}")
            self._lasting = lasting
        give_up = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                if time.monotonic() > give_up:
                    raise StoreUnavailable(
                        f"{self._path}: another process has held the write lock for {BUSY_SECONDS:g} s"
                    ) from error
                time.sleep(_RETRY_SECONDS)
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            [version] = connection.execute("PRAGMA data_version").fetchone()
            if version != self._seen_version:
                self._contended_until = time.monotonic() + _CONTENTION_SECONDS if self._seen_version else 0.0
                self._seen_version = version

    def _end_leases(self, connection: sqlite3.Connection, tx: Transaction) -> None:
        """Those that this process gave end on time; those of others are looked for now and then."""
        if tx.now >= self._next_lapse:
            drive(connection, expire(tx))
            self._next_lapse = tx.now + _LOOK_SECONDS

    def _read_each(self, connection: sqlite3.Connection, batch: Sequence[Job[Any]]) -> None:
        outcomes: list[Outcome] = []
        for job in batch:
            try:
                connection.execute("BEGIN")
                outcomes.append((drive(connection, job.make()), None))
            except Exception as error:  # noqa: BLE001 - passed on to whoever made the call
                outcomes.append((None, self._plain(error)))
            finally:
                connection.execute("COMMIT")
        self._answer(batch, outcomes, None)

    def _plain(self, error: Exception) -> Exception:
        """What the caller is told."""
        if isinstance(error, UnicodeEncodeError):  # half a character
            return StoreError(f"a text that cannot be stored: {error}")
        if isinstance(error, sqlite3.Error):
            return StoreUnavailable(f"{self._path}: {error}")
        return error

    def _answer(
        self, batch: Sequence[Job[Any]], outcomes: Sequence[Outcome], changes: Changes | None
    ) -> None:
        if not self._loop.is_closed():  # a loop that is gone has nobody left to tell
            self._loop.call_soon_threadsafe(self._deliver, batch, outcomes, changes)

    # -- in the event loop --------------------------------------------------------------------------

    def _deliver(
        self, batch: Sequence[Job[Any]], outcomes: Sequence[Outcome], changes: Changes | None
    ) -> None:
        answer(batch, outcomes)
        if changes is not None:
            self._on_change(changes)

    async def _look_for_changes(self, waited_for: Callable[[], bool]) -> None:
        version, cursor = 0, 0
        while True:
            await asyncio.sleep(POLL_SECONDS if waited_for() else IDLE_POLL_SECONDS)
            if not waited_for():
                continue
            try:
                version, news = await self.read(partial(_news, version))
            except StoreUnavailable as error:  # whoever calls is told; the looking goes on
                _log.warning("cannot look for changes, trying again: %s", error)
                continue
            if news is not None:
                waiting, last, taken = news
                self._on_change(Changes(waiting=waiting, completed=last > cursor, taken=taken))
                cursor = last


class _Thread:
    """A connection of its own, and the jobs that come to it in batches."""

    def __init__(
        self,
        name: str,
        connection: sqlite3.Connection,
        run: Callable[[sqlite3.Connection, Sequence[Job[Any]]], None],
    ) -> None:
        self._jobs: SimpleQueue[list[Job[Any]] | None] = SimpleQueue()
        self._gathered: list[Job[Any]] = []
        self._connection = connection
        self._run = run
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def gather(self, job: Job[Any], loop: asyncio.AbstractEventLoop) -> None:
        """Hands over all jobs of one round of the event loop together: callers that were answered together ask
        together, and would otherwise be torn apart by a thread that takes the first as soon as it comes."""
        if not self._gathered:
            loop.call_soon(self._hand_over)
        self._gathered.append(job)

    def _hand_over(self) -> None:
        if self._gathered:
            self._jobs.put(self._gathered)
            self._gathered = []

    def stop(self) -> None:
        """Returns when the jobs that came before are done."""
        self._hand_over()
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        try:
            while batch := self._next_batch():
                self._run(self._connection, batch)
        finally:
            self._connection.close()

    def _next_batch(self) -> list[Job[Any]]:
        """All jobs that are waiting, at least one; none when it is time to stop."""
        batch: list[Job[Any]] = []
        jobs = self._jobs.get()
        while jobs is not None:
            batch += jobs
            if len(batch) >= MAX_BATCH:
                return batch
            try:
                jobs = self._jobs.get_nowait()
            except Empty:
                return batch
        if batch:
            self._jobs.put(None)  # stop after this batch
        return batch


def _news(version: int) -> Operation[tuple[int, tuple[bool, int, bool] | None]]:
    """The file's version, and what waiting calls look for if it is another one than before."""
    [[now]] = yield DATA_VERSION()
    return now, None if now == version else (yield from progress())


DATA_VERSION = Statement(text("PRAGMA data_version"))
