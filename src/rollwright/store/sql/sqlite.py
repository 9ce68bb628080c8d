"""SQLite as a driver: one connection writes, one reads in a thread of its own.

A read sees the file as it was when it began, whatever is written meanwhile. A change made by another process is
noticed by polling `data_version`, which reads a few bytes of shared memory.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import text

from rollwright.store.contract import StoreError, StoreUnavailable
from rollwright.store.sql.driver import Job, Outcome, Read, Write, answer
from rollwright.store.sql.looking import progress
from rollwright.store.sql.sqlite_file import open_file
from rollwright.store.sql.sqlite_thread import ConnectionThread, drive
from rollwright.store.sql.sqlite_writer import Done, Writer, plain
from rollwright.store.sql.statements import Operation, Statement
from rollwright.store.sql.transaction import Changes, Stamps

_log = logging.getLogger(__name__)

POLL_SECONDS = 0.02
"""How often to look for other processes' changes while somebody waits for one."""
IDLE_POLL_SECONDS = 0.25

Result = TypeVar("Result")


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
        self._loop = asyncio.get_running_loop()
        self._on_change: Callable[[Changes], None] = lambda changes: None
        self._poll: asyncio.Task[None] | None = None
        self._closed = False
        self.stamps = Stamps()
        self._writer = Writer(path, writer, clock, self.stamps, self._deliver)
        self._reader = _Reader(path, reader, self._writer.once_flushed)

    def write(
        self,
        make: Write[Result],
        *,
        lasting: bool,
        brief: bool = False,
        orphaned: Callable[[Result], None] | None = None,
    ) -> "asyncio.Future[Result]":
        job = Job(make, self._future(), lasting, brief, orphaned)
        self._writer.gather(job)
        return job.future

    def read(self, make: Read[Result]) -> "asyncio.Future[Result]":
        job = Job(make, self._future())
        self._reader.gather(job)
        return job.future

    def watch(self, on_change: Callable[[Changes], None], waited_for: Callable[[], bool]) -> None:
        self._on_change = on_change
        self._poll = self._loop.create_task(self._look_for_changes(waited_for))

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

    def _deliver(self, done: Done) -> None:
        answer(done.jobs, done.outcomes)
        self._on_change(done.changes)

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


class _Reader:
    """Runs the reads of one round of the event loop one after the other, and answers them together.

    Always in its thread: whoever reads news there finds some more of it than in the event loop, and reads less often.
    """

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        once_flushed: Callable[[Callable[[], None]], None],
    ) -> None:
        """`once_flushed` is called in the event loop with the answering, and calls it."""
        self._path = path
        self._once_flushed = once_flushed
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
        """Leaves what has gathered to the thread; `stop` waits for it."""
        if self._gathered:
            self._thread.put(partial(self._read_each, self._gathered))
            self._gathered = []

    def stop(self) -> None:
        """In any thread; returns when the jobs that came before `finish` are done."""
        self._thread.stop()

    def _read_each(self, batch: Sequence[Job[Any]]) -> None:
        outcomes: list[Outcome] = []
        for job in batch:
            try:
                self._cursor.execute("BEGIN")
                outcomes.append((drive(self._cursor, job.make()), None))
            except Exception as error:  # noqa: BLE001 - passed on to whoever made the call
                outcomes.append((None, plain(error, self._path)))
            finally:
                if self._connection.in_transaction:
                    self._cursor.execute("COMMIT")
        if not self._loop.is_closed():  # a loop that is gone has nobody left to tell
            self._loop.call_soon_threadsafe(self._once_flushed, partial(answer, batch, outcomes))


def _news(version: int) -> Operation[tuple[int, tuple[bool, int, bool] | None]]:
    """The file's version, and what waiting calls look for if it is another one than before."""
    [[now]] = yield DATA_VERSION()
    return now, None if now == version else (yield from progress())


DATA_VERSION = Statement(text("PRAGMA data_version"))
