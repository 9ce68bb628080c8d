"""Who writes to a SQLite file: many calls in one transaction, on disk before any of them is answered.

The connection is used by one at a time. All calls of one round of the event loop make a batch: callers that were
answered together ask together. A brief batch runs where the callers are, in the event loop's own thread, because
handing it to another thread and back costs more than its statements do. Whatever can take long is left to the writer
thread: flushing the log to disk, a checkpoint, waiting for another process's lock, ending leases, calls with much to
do. What has to last is answered when it is on disk (it survives a power cut); until then whatever else has to last
gathers, to share the next flush, and what need not goes on. The busier the store, the more calls share a commit.

The thread commits with `synchronous=FULL`. A batch that ran in the event loop is committed without a flush, and the
thread flushes the log: the same, in two steps. Whoever reads in between is answered after the flush.

Several processes may open the same file. Each transaction begins with the write lock, so they take turns, and
a process that sees another one writing makes a short pause after each commit: SQLite's lock has no queue, and
without the pause the process that just released it would get it again.
"""

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rollwright.store.errors import StoreUnavailable
from rollwright.store.sql.changes import expire
from rollwright.store.sql.driver import Job, Outcome, run_all
from rollwright.store.sql.queries import FIRST_LEASE
from rollwright.store.sql.sqlite_file import BUSY_SECONDS, CHECKPOINT_PAGES, check_file, file_identity
from rollwright.store.sql.sqlite_thread import ConnectionThread, as_store_error, drive
from rollwright.store.sql.transaction import Changes, HeldRows, Stamps, Transaction

MAX_BATCH = 128
"""A transaction with so many calls takes no more: enough to hide the cost of a flush, few enough to hold up the event
loop for a millisecond or two. In the thread they would take it as long: most of their time is Python's, which runs
in one thread at a time."""
LOOP_COMMITS = 100
"""Batches committed in the event loop, after which one goes to the thread, which may copy the log into the file."""
LOOP_FLUSHES = 128
"""How often the event loop waits for the disk itself, after it had nothing else to do while the thread did."""
QUICK_FLUSH_SECONDS = 0.0005
"""A flush that takes longer is the thread's."""
IDLE_SHARE = 0.25
"""Of the time of a flush: with less work in it, the event loop had nothing else to do."""

_RETRY_SECONDS = 0.0002
"""Pause between two tries to get the write lock; shorter than the courtesy pause, so that it falls into it."""
_COURTESY_SECONDS = 0.0005
_CONTENTION_SECONDS = 1.0
"""For how long after it was last seen writing another process is treated as present."""
_CHECK_SECONDS = 0.01
"""How often to look whether another process let a lease run out, and whether the file is still there."""


Argument = TypeVar("Argument")
Result = TypeVar("Result")


class BatchResult(NamedTuple):
    """A transaction that is over, and what came of its calls."""

    jobs: Sequence[Job[Any]]
    outcomes: Sequence[Outcome]
    changes: Changes


class Writer:
    """Belongs to the event loop it was made in. `deliver` is called there with all that was done."""

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        clock: Callable[[], float],
        stamps: Stamps,
        deliver: Callable[[BatchResult], None],
    ) -> None:
        self._path = path
        self._connection = connection
        self._cursor = connection.cursor()
        """One for all: making one costs as much as a small statement."""
        self._clock = clock
        self._stamps = stamps
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._thread = ConnectionThread(f"{path.name} writer", connection)
        self._log = os.open(f"{path}-wal", os.O_RDONLY)
        self._gathered: list[Job[Any]] = []
        self._batch_scheduled = False
        """Whether the event loop is going to call `_begin_batch`."""
        self._thread_has_connection = False
        """Whether the thread has the connection."""
        self._flushing = False
        """Whether the thread is about to flush what was committed here."""
        self._delayed_reads: list[Callable[[], None]] = []
        """Answers to reads, which may have seen what is not on disk yet."""
        self._broken: StoreUnavailable | None = None
        """Why nothing more is taken: what the disk has is not known any more."""
        self._file = file_identity(path)
        self._next_file_check = 0.0
        """When, by the monotonic clock, to look whether the file is still where it was."""
        self._loop_commits = 0
        self._loop_flushes = 0
        """How many more the event loop waits for itself."""
        self._worked = 0.0
        """CPU time of the event loop's thread when a flush began."""
        self._held = HeldRows()
        """Good as long as nobody else writes, which is looked at in each transaction."""
        self._asked = Transaction(0.0, stamps, held=self._held)
        """For calls that need none: it never writes."""
        self._others_checked = False
        """Whether others' writes were looked for since the event loop last came to `_begin_batch`, which was called for no
        later than the look. Once is enough: whoever hears of a later write hears of it in a callback behind that one."""
        self._pragmas: tuple[bool, bool] | None = None
        """How `_set_pragmas` was last called."""
        self._next_expiry = 0.0
        """When, by the store's clock, to look for leases that are over."""
        self._seen_version = 0
        self._contended_until = 0.0

    # -- in the event loop --------------------------------------------------------------------------

    def gather(self, job: Job[Any]) -> None:
        self._gathered.append(job)
        if not self._batch_scheduled and not self._thread_has_connection:
            self._schedule_batch()

    def recall(
        self, answer: Callable[[Transaction, Argument], Result | None], argument: Argument
    ) -> Result | None:
        """The answer to a call that needs no transaction, or `None` if this one does. It may overtake calls that have
        gathered: none of them has been answered, so nobody can tell in which order they came."""
        if self._thread_has_connection or self._broken is not None:
            return None
        if not self._others_checked:
            try:
                self._check_other_writers()
            except sqlite3.Error:  # the transaction finds out what is wrong, and whom to tell
                return None
            self._others_checked = True
            if not self._batch_scheduled:
                self._schedule_batch()
        self._asked.now = self._clock()
        return answer(self._asked, argument)

    def finish(self) -> None:
        """Leaves what has gathered to the thread; `stop` waits for it."""
        if self._gathered:
            self._hand_over(self._gathered)
            self._gathered = []

    def stop(self) -> None:
        """In any thread; returns when the jobs that came before `finish` are done."""
        self._thread.stop()
        os.close(self._log)

    def call_when_flushed(self, answer: Callable[[], None]) -> None:
        """Calls it when all that is committed now is on disk."""
        if self._flushing:
            self._delayed_reads.append(answer)
        else:
            answer()

    def _schedule_batch(self) -> None:
        self._batch_scheduled = True
        self._loop.call_soon(self._begin_batch)

    def _begin_batch(self) -> None:
        self._batch_scheduled = self._others_checked = False
        if self._thread_has_connection:
            return
        batch = self._next_batch()
        if not batch:
            return
        try:
            if self._is_brief(batch):
                self._run_in_loop(batch)
            else:
                self._hand_over(batch)
        except Exception as error:  # noqa: BLE001 - they would wait for ever
            self._end_batch([self._refuse(batch, error)])

    def _next_batch(self) -> list[Job[Any]]:
        """While the disk is written, what has to last stays where it is."""
        may_run = self._gathered
        waits: list[Job[Any]] = []
        # Not split in two groups of which one runs while the other is flushed: with few callers each group would pay for
        # a transaction and a flush of its own, which costs more than the disk's idle time.
        if self._flushing:
            may_run = [job for job in self._gathered if not job.durable]
            waits = [job for job in self._gathered if job.durable]
        self._gathered = may_run[MAX_BATCH:] + waits
        return may_run[:MAX_BATCH]

    def _is_brief(self, batch: Sequence[Job[Any]]) -> bool:
        if self._loop_commits >= LOOP_COMMITS or self._broken is not None:
            return False
        for job in batch:
            if not job.brief:
                return False
        return time.monotonic() >= self._contended_until and not self._has_expired_leases()

    def _has_expired_leases(self) -> bool:
        """Whether leases are over. Ending them may take long; looking for them does not."""
        now = self._clock()
        if now >= self._next_expiry:
            try:
                [lease] = self._connection.execute(FIRST_LEASE.sqlite.sql).fetchone()
            except Exception:  # noqa: BLE001 - the thread finds out what is wrong, and whom to tell
                return True
            self._next_expiry = now + _CHECK_SECONDS if lease is None else min(lease, now + _CHECK_SECONDS)
        return now >= self._next_expiry

    def _run_in_loop(self, batch: Sequence[Job[Any]]) -> None:
        try:
            self._set_pragmas(
                durable=False, checkpoint=False
            )  # flushed afterwards, without holding the write lock
            # IMMEDIATE: a transaction that read first and then wanted the lock could find that what it read is old.
            self._cursor.execute("BEGIN IMMEDIATE")
            self._check_other_writers()
            done = self._run(batch)
            self._cursor.execute("COMMIT")
        except Exception:  # noqa: BLE001 - the thread waits for the lock, and finds the call that fails
            self._roll_back()
            self._hand_over(batch)
            return
        self._loop_commits += 1
        for job in batch:
            if job.durable:
                self._make_durable(done)  # one flush for all of them; the others are answered with it
                return
        self._end_in_loop(done)

    def _make_durable(self, done: BatchResult) -> None:
        if self._loop_flushes:
            self._loop_flushes -= 1
            done, seconds = self._flush(done)
            if seconds > QUICK_FLUSH_SECONDS:
                self._loop_flushes = 0
            self._end_in_loop(done)
        else:
            self._flushing = (
                True  # from here on answers to reads are held back: they may show what the disk lacks
            )
            self._worked = time.thread_time()
            self._thread.put(partial(self._flush_in_thread, done), partial(self._fail_flush, done))

    def _end_in_loop(self, done: BatchResult) -> None:
        # The transaction has just looked for others' writes: a heartbeat of a caller that is answered now need not.
        self._others_checked = True
        self._end_batch([done])

    def _hand_over(self, batch: Sequence[Job[Any]]) -> None:
        self._thread_has_connection = True
        self._loop_commits = 0  # the thread's commit may copy the log into the file
        self._thread.put(partial(self._run_in_thread, batch), partial(self._fail_batch, batch))

    def _take_back(self, done: Sequence[BatchResult]) -> None:
        self._thread_has_connection = False
        self._end_batch(done)

    def _end_flush(self, done: BatchResult, seconds: float) -> None:
        self._flushing = False
        if may_flush_in_loop(seconds, time.thread_time() - self._worked):
            self._loop_flushes = LOOP_FLUSHES
        held_back, self._delayed_reads = self._delayed_reads, []
        self._end_batch([done])
        for answer in held_back:
            answer()

    def _end_batch(self, done: Sequence[BatchResult]) -> None:
        for each in done:
            self._deliver(each)
        # Those who were just answered run before this, in the same round of the event loop, and what they ask for next
        # takes part.
        if not self._batch_scheduled and not self._thread_has_connection:
            self._schedule_batch()

    # -- in the writer thread -----------------------------------------------------------------------

    def _flush_in_thread(self, done: BatchResult) -> None:
        done, seconds = self._flush(done)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end_flush, done, seconds)

    def _run_in_thread(self, batch: Sequence[Job[Any]]) -> None:
        self._answer(self._transact(batch))
        if time.monotonic() < self._contended_until:
            time.sleep(_COURTESY_SECONDS)

    def _fail_flush(self, done: BatchResult, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._end_flush, self._refuse(done.jobs, error), 0.0)

    def _fail_batch(self, batch: Sequence[Job[Any]], error: BaseException) -> None:
        self._answer([self._refuse(batch, error)])

    def _transact(self, batch: Sequence[Job[Any]]) -> list[BatchResult]:
        try:
            if self._broken is not None:
                raise self._broken
            self._set_pragmas(durable=any(job.durable for job in batch), checkpoint=True)
            self._wait_for_lock()
            self._check_other_writers()
            done = self._run(batch)
            self._cursor.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - passed on to whoever made the call
            self._roll_back()
            if len(batch) > 1:  # so that only the call that fails is told
                return [done for job in batch for done in self._transact([job])]
            return [self._refuse(batch, error)]
        return [done]

    def _wait_for_lock(self) -> None:
        give_up = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self._cursor.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                if time.monotonic() > give_up:
                    raise StoreUnavailable(
                        f"{self._path}: another process has held the write lock for {BUSY_SECONDS:g} s"
                    ) from error
                time.sleep(_RETRY_SECONDS)

    def _answer(self, done: Sequence[BatchResult]) -> None:
        if not self._loop.is_closed():  # a loop that is gone has nobody left to tell
            self._loop.call_soon_threadsafe(self._take_back, done)

    # -- whoever has the connection -----------------------------------------------------------------

    def _set_pragmas(self, *, durable: bool, checkpoint: bool) -> None:
        """Whether the next commit is flushed to disk, and whether it may copy the log into the file."""
        if (durable, checkpoint) != self._pragmas:
            # As a script, which is compiled each time: some pragmas take effect when they are compiled.
            self._connection.executescript(
                f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'};"
                f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES if checkpoint else 0}"
            )
            self._pragmas = (durable, checkpoint)

    def _check_other_writers(self) -> None:
        """Forgets what is remembered if another process has written since."""
        [version] = self._cursor.execute("PRAGMA data_version").fetchone()
        if version != self._seen_version:
            self._held.clear()
            self._contended_until = time.monotonic() + _CONTENTION_SECONDS if self._seen_version else 0.0
            self._seen_version = version

    def _run(self, batch: Sequence[Job[Any]]) -> BatchResult:
        """All of the transaction but its beginning and its end."""
        self._check_file()
        tx = Transaction(self._clock(), self._stamps, alone=True, held=self._held)
        if tx.now >= self._next_expiry:
            # Leases that this process gave end on time; those of others are looked for now and then.
            drive(self._cursor, expire(tx))
            self._next_expiry = tx.now + _CHECK_SECONDS
        outcomes = drive(self._cursor, run_all(tx, batch))
        self._next_expiry = min(self._next_expiry, tx.changes.lease)
        return BatchResult(batch, outcomes, tx.changes)

    def _flush(self, done: BatchResult) -> tuple[BatchResult, float]:
        """What its callers are to be told once the log is on disk, and how long that took."""
        began = time.perf_counter()
        try:
            flush(self._log)
        except OSError as error:
            # The system may have dropped the pages that it could not write, so a second flush that succeeds proves nothing.
            self._broken = StoreUnavailable(
                f"{self._path}: cannot be flushed to disk; open it again: {error}"
            )
            done = self._refuse(done.jobs, self._broken)
        return done, time.perf_counter() - began

    def _check_file(self) -> None:
        """A file that was deleted or replaced can still be written, for nobody ever to read."""
        now = time.monotonic()
        if now >= self._next_file_check:
            self._next_file_check = now + _CHECK_SECONDS
            try:
                check_file(self._path, self._file)
                if not os.fstat(self._log).st_nlink:
                    raise StoreUnavailable(f"{self._path}-wal was removed while it was open")
            except StoreUnavailable as gone:
                self._broken = gone
                raise

    def _refuse(self, batch: Sequence[Job[Any]], error: BaseException) -> BatchResult:
        return BatchResult(batch, [(None, as_store_error(error, self._path))] * len(batch), Changes())

    def _roll_back(self) -> None:
        """Never raises: a connection that cannot even do that says so to the next call."""
        self._held.clear()  # it may remember rows as the transaction would have left them
        with suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")


def may_flush_in_loop(seconds: float, worked: float) -> bool:
    """Whether the event loop may wait for the disk itself, after a flush that took so long, in which it worked so much.
    That spares the way to another thread and back, which costs about as much again."""
    return seconds <= QUICK_FLUSH_SECONDS and worked < seconds * IDLE_SHARE


def flush(file: int) -> None:
    """Its contents and its length."""
    os.fdatasync(file) if hasattr(os, "fdatasync") else os.fsync(file)
