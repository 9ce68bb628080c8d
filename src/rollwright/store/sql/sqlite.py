"""The SQLite driver: one connection writes, another one reads in a thread of its own.

A read sees a snapshot of the file from its beginning. Changes of other processes are found by polling `data_version`,
which reads a few bytes of shared memory.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import text

from rollwright.errors import RollwrightError
from rollwright.forks import bind_to_process
from rollwright.store.errors import StoreError
from rollwright.store.sql.driver import BatchedCall, Job, Outcome, Read, Write, answer
from rollwright.store.sql.queries import progress
from rollwright.store.sql.sqlite_file import check_file, file_identity, open_file
from rollwright.store.sql.sqlite_thread import ConnectionThread, as_store_error, drive
from rollwright.store.sql.sqlite_writer import BatchResult, Writer
from rollwright.store.sql.statements import Operation, Statement
from rollwright.store.sql.transaction import Changes, Stamps

_log = logging.getLogger(__name__)

POLL_SECONDS = 0.02
"""Interval of the polls for other processes' changes while a call waits for one."""
IDLE_POLL_SECONDS = 0.25
_PAUSE_SECONDS = 1.0
"""Pause after a poll of a file that cannot be read."""

Result = TypeVar("Result")


class SqliteDriver:
    """Belongs to the event loop that it was opened in."""

    repeats = False
    fork_error = StoreError

    @classmethod
    async def open(cls, path: Path, clock: Callable[[], float] | None = None) -> "SqliteDriver":
        time_of_store, writer, reader = await asyncio.to_thread(open_file, path, clock)
        try:
            return cls(path, time_of_store, writer, reader)
        except OSError as error:
            writer.close()
            reader.close()
            raise StoreError(f"{path} cannot be opened as a store: {error}") from error

    def __init__(
        self, path: Path, clock: Callable[[], float], writer: sqlite3.Connection, reader: sqlite3.Connection
    ) -> None:
        bind_to_process(self)
        self._loop = asyncio.get_running_loop()
        self._on_change: Callable[[Changes], None] = lambda changes: None
        self._poll: asyncio.Task[None] | None = None
        self._closed = False
        self.stamps = Stamps()
        self.where = str(path)
        self._writer = Writer(path, writer, clock, self.stamps, self._deliver)
        self._reader = _Reader(path, reader, self._writer.call_when_flushed)

    def write(
        self,
        make: Write[Result],
        *,
        durable: bool,
        brief: bool = False,
        orphaned: Callable[[Result], None] | None = None,
    ) -> "asyncio.Future[Result]":
        future = self._future()
        if type(make) is BatchedCall and make.recall is not None:
            known = self._writer.recall(make.recall, make.argument)
            if known is not None:
                future.set_result(known)
                return future
        self._writer.gather(Job(make, future, durable, brief, orphaned))
        return future

    def read(self, make: Read[Result]) -> "asyncio.Future[Result]":
        job = Job(make, self._future())
        self._reader.gather(job)
        return job.future

    def watch(self, on_change: Callable[[Changes], None], has_waiters: Callable[[], bool]) -> None:
        self._on_change = on_change
        self._poll = self._loop.create_task(self._poll_changes(has_waiters))

    async def close(self) -> None:
        self._closed = True
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.gather(self._poll, return_exceptions=True)
        for each in (self._writer, self._reader):
            each.finish()
            await asyncio.to_thread(each.stop)

    def _future(self) -> "asyncio.Future[Any]":
        if self._closed:
            raise StoreError("the store is closed")
        return self._loop.create_future()

    def _deliver(self, done: BatchResult) -> None:
        answer(done.jobs, done.outcomes)
        self._on_change(done.changes)

    async def _poll_changes(self, has_waiters: Callable[[], bool]) -> None:
        version, cursor = 0, 0
        while True:
            await asyncio.sleep(POLL_SECONDS if has_waiters() else IDLE_POLL_SECONDS)
            if not has_waiters():
                continue
            try:
                version, news = await self.read(partial(_progress_since, version))
            except RollwrightError as error:
                _log.warning("cannot poll for changes, will retry: %s", error)
                self._on_change(
                    Changes(waiting=True, completed=True, taken=True)
                )  # so that waiting calls read, and fail
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if news is not None:
                waiting, last, taken = news
                self._on_change(Changes(waiting=waiting, completed=last > cursor, taken=taken))
                cursor = last


class _Reader:
    """Runs the reads of one iteration of the event loop one after the other, and answers them together.

    Always in its thread, also for brief reads: a reader of a log that is answered a little later finds more entries, and
    reads less often.
    """

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        call_when_flushed: Callable[[Callable[[], None]], None],
    ) -> None:
        """`call_when_flushed` gets a callback that answers the reads, and calls it in the event loop."""
        self._path = path
        self._file = file_identity(path)
        self._call_when_flushed = call_when_flushed
        self._connection = connection
        self._cursor = connection.cursor()
        self._loop = asyncio.get_running_loop()
        self._thread = ConnectionThread(f"{path.name} reader", connection)
        self._gathered: list[Job[Any]] = []

    def gather(self, job: Job[Any]) -> None:
        if not self._gathered:
            self._loop.call_soon(self.finish)
        self._gathered.append(job)

    def finish(self) -> None:
        """Hands the pending reads to the thread; `stop` waits for them."""
        if self._gathered:
            batch, self._gathered = self._gathered, []
            self._thread.put(partial(self._read_each, batch), partial(self._fail, batch))

    def stop(self) -> None:
        """Returns when all reads from before `finish` are done. May be called in any thread."""
        self._thread.stop()

    def _read_each(self, batch: Sequence[Job[Any]]) -> None:
        outcomes: list[Outcome] = []
        for job in batch:
            try:
                check_file(self._path, self._file)
                self._cursor.execute("BEGIN")
                outcomes.append((drive(self._cursor, job.make()), None))
            except Exception as error:  # noqa: BLE001 - passed on to the caller
                outcomes.append((None, as_store_error(error, self._path)))
            finally:
                self._end_transaction()
        self._answer(batch, outcomes)

    def _end_transaction(self) -> None:
        """Never raises: a connection that cannot end its transaction fails the next call."""
        for way in ("COMMIT", "ROLLBACK"):
            with suppress(sqlite3.Error):
                if self._connection.in_transaction:
                    self._cursor.execute(way)

    def _fail(self, batch: Sequence[Job[Any]], error: BaseException) -> None:
        self._answer(batch, [(None, as_store_error(error, self._path))] * len(batch))

    def _answer(self, batch: Sequence[Job[Any]], outcomes: Sequence[Outcome]) -> None:
        if not self._loop.is_closed():  # a closed loop has no callers
            self._loop.call_soon_threadsafe(self._call_when_flushed, partial(answer, batch, outcomes))


def _progress_since(version: int) -> Operation[tuple[int, tuple[bool, int, bool] | None]]:
    """The file's version, and the state that waiting calls depend on if the version has changed."""
    [[now]] = yield DATA_VERSION()
    return now, None if now == version else (yield from progress())


DATA_VERSION = Statement(text("PRAGMA data_version"))
