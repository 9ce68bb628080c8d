"""The writer of a SQLite file: batches calls into transactions, and answers a durable call when it is on disk.

One thread at a time uses the connection. All calls of one iteration of the event loop form a batch, which runs as one
transaction; callers that are answered together call again together. A brief batch runs in the event loop's own thread,
because a hand-over to another thread and back costs more than its statements. The writer thread gets everything that
can take long: flushes of the log, checkpoints, waiting for another process's lock, expired leases, calls with many
rows. While a flush runs, further durable calls wait and share the next flush; other calls proceed. The busier the store,
the more calls share a commit.

The thread commits with `synchronous=FULL`. A batch in the event loop commits with `NORMAL` and is flushed afterwards,
which is the same in two steps. Reads in between are answered after the flush, because they may show the commit.

A claim or a heartbeat is answered after its commit, without a flush of its own. That is safe because the log is
sequential: the flush of any later call, such as the first turn of a claimed attempt, writes all earlier commits too. A
power cut can take back only claims that no durable call followed; their rollouts are then claimed again.

Several processes may open the same file. Each transaction begins with the write lock, so they take turns. A process that
sees another one write pauses shortly after each commit: SQLite's lock has no queue, and without the pause the process
that just released it would get it again.
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
"""Most calls in one transaction: enough to amortize a flush, few enough to block the event loop for no more than a
millisecond or two. The thread would block it as long: most of the time is Python's, under the interpreter lock."""
LOOP_COMMITS = 100
"""Consecutive batches committed in the event loop; the next one goes to the thread, which may run a checkpoint."""
LOOP_FLUSHES = 128
"""Flushes that the event loop runs itself after it was idle during a flush of the thread."""
QUICK_FLUSH_SECONDS = 0.0005
"""Longest flush that the event loop may run itself; after a slower one the thread runs them again."""
IDLE_SHARE = 0.25
"""Fraction of a flush's time: an event loop with less CPU time than that counts as idle during the flush."""

_RETRY_SECONDS = 0.0002
"""Pause between two attempts to get the write lock; shorter than the courtesy pause, so that one of them falls into it."""
_COURTESY_SECONDS = 0.0005
"""Pause after a commit while another process writes, so that it gets the lock."""
_CONTENTION_SECONDS = 1.0
"""How long after its last write another process is assumed to be writing still."""
_CHECK_SECONDS = 0.01
"""Interval of the checks for expired leases of other processes, and for a file that was removed or replaced."""


Argument = TypeVar("Argument")
Result = TypeVar("Result")


class BatchResult(NamedTuple):
    """A finished transaction and the outcomes of its calls."""

    jobs: Sequence[Job[Any]]
    outcomes: Sequence[Outcome]
    changes: Changes


class Writer:
    """Belongs to the event loop that it was created in. `deliver` is called there with each finished batch."""

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
        """Reused: creating a cursor costs as much as a small statement."""
        self._clock = clock
        self._stamps = stamps
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._thread = ConnectionThread(f"{path.name} writer", connection)
        self._log = os.open(f"{path}-wal", os.O_RDONLY)
        self._gathered: list[Job[Any]] = []
        self._batch_scheduled = False
        """Whether the event loop has a pending call of `_begin_batch`."""
        self._thread_has_connection = False
        """Whether the thread runs a batch; the event loop must not touch the connection."""
        self._flushing = False
        """Whether the thread is flushing a commit of the event loop."""
        self._delayed_reads: list[Callable[[], None]] = []
        """Answers to reads that may have seen a commit which is not on disk yet."""
        self._broken: StoreUnavailable | None = None
        """Why every call is rejected: the state of the file on disk is unknown."""
        self._file = file_identity(path)
        self._next_file_check = 0.0
        """When, on the monotonic clock, to check that the path still names the opened file."""
        self._loop_commits = 0
        self._loop_flushes = 0
        """How many more flushes the event loop runs itself."""
        self._worked = 0.0
        """CPU time of the event loop's thread at the start of the thread's flush."""
        self._held = HeldRows()
        """Valid while no other process writes, which each transaction checks."""
        self._without_writes = Transaction(0.0, stamps, held=self._held)
        """Passed to calls that are answered from the held rows alone."""
        self._others_checked = False
        """Whether writes of other processes were checked for since the last `_begin_batch`, which is always scheduled by the
        time of the check. One check per iteration is enough: a callback that learns of a later write from elsewhere runs
        behind that `_begin_batch`."""
        self._pragmas: tuple[bool, bool] | None = None
        """The last arguments of `_set_pragmas`."""
        self._next_expiry = 0.0
        """When, on the store's clock, to look for expired leases."""
        self._seen_version = 0
        """SQLite's `data_version` at the last check; another connection's commit changes it."""
        self._contended_until = 0.0
        """Until when, on the monotonic clock, another process counts as writing."""

    # -- in the event loop --------------------------------------------------------------------------

    def gather(self, job: Job[Any]) -> None:
        """Adds the call to the next batch."""
        self._gathered.append(job)
        if not self._batch_scheduled and not self._thread_has_connection:
            self._schedule_batch()

    def recall(
        self, answer: Callable[[Transaction, Argument], Result | None], argument: Argument
    ) -> Result | None:
        """Answers a call from the held rows; `None` if it needs a transaction.

        It may overtake calls in the next batch: none of them has been answered, so their order is not observable.
        """
        if self._thread_has_connection or self._broken is not None:
            return None
        if not self._others_checked:
            try:
                self._check_other_writers()
            except sqlite3.Error:  # a transaction meets the same error, and reports it to the caller
                return None
            self._others_checked = True
            if not self._batch_scheduled:
                self._schedule_batch()
        self._without_writes.now = self._clock()
        return answer(self._without_writes, argument)

    def finish(self) -> None:
        """Hands the pending calls to the thread; `stop` waits for them."""
        if self._gathered:
            self._hand_over(self._gathered)
            self._gathered = []

    def stop(self) -> None:
        """Returns when all calls from before `finish` are done. May be called in any thread."""
        self._thread.stop()
        os.close(self._log)

    def call_when_flushed(self, answer: Callable[[], None]) -> None:
        """Calls `answer` when everything that is committed now is on disk."""
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
        except Exception as error:  # noqa: BLE001 - else its callers would wait for ever
            self._end_batch([self._refuse(batch, error)])

    def _next_batch(self) -> list[Job[Any]]:
        """Takes the calls of the next transaction; during a flush, durable calls stay for the one after it."""
        may_run = self._gathered
        waits: list[Job[Any]] = []
        # The callers are not split into two groups, one of which executes while the other is flushed. Measured with four
        # callers on a disk with flushes of 0.1 ms, that takes half as long again: each group pays for a transaction, a
        # flush and a thread switch of its own, 75 µs of CPU for each rollout, to hide 35 µs of waiting.
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
        """Whether there are expired leases: the thread ends them, which may take long."""
        now = self._clock()
        if now >= self._next_expiry:
            try:
                [lease] = self._connection.execute(FIRST_LEASE.sqlite.sql).fetchone()
            except Exception:  # noqa: BLE001 - the thread meets the same error, and reports it to the caller
                return True
            self._next_expiry = now + _CHECK_SECONDS if lease is None else min(lease, now + _CHECK_SECONDS)
        return now >= self._next_expiry

    def _run_in_loop(self, batch: Sequence[Job[Any]]) -> None:
        try:
            self._set_pragmas(durable=False, checkpoint=False)  # flushed afterwards, without the write lock
            # IMMEDIATE: a transaction that reads first and asks for the lock later fails if its snapshot is old by then.
            self._cursor.execute("BEGIN IMMEDIATE")
            self._check_other_writers()
            done = self._run(batch)
            self._cursor.execute("COMMIT")
        except Exception:  # noqa: BLE001 - the thread waits for the lock, and isolates a failing call
            self._roll_back()
            self._hand_over(batch)
            return
        self._loop_commits += 1
        for job in batch:
            if job.durable:
                self._make_durable(done)  # one flush for the whole batch, which is answered together
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
            # From here on answers to reads are delayed: they may show what is not on disk.
            self._flushing = True
            self._worked = time.thread_time()
            self._thread.put(partial(self._flush_in_thread, done), partial(self._fail_flush, done))

    def _end_in_loop(self, done: BatchResult) -> None:
        # The transaction has just checked for other writers: heartbeats of the callers it answers need not.
        self._others_checked = True
        self._end_batch([done])

    def _hand_over(self, batch: Sequence[Job[Any]]) -> None:
        self._thread_has_connection = True
        self._loop_commits = 0  # the thread's commit checkpoints if the log is long
        self._thread.put(partial(self._run_in_thread, batch), partial(self._fail_batch, batch))

    def _take_back(self, done: Sequence[BatchResult]) -> None:
        self._thread_has_connection = False
        self._end_batch(done)

    def _end_flush(self, done: BatchResult, seconds: float) -> None:
        self._flushing = False
        if may_flush_in_loop(seconds, time.thread_time() - self._worked):
            self._loop_flushes = LOOP_FLUSHES
        delayed, self._delayed_reads = self._delayed_reads, []
        self._end_batch([done])
        for answer in delayed:
            answer()

    def _end_batch(self, done: Sequence[BatchResult]) -> None:
        for each in done:
            self._deliver(each)
        # Scheduled behind the callers that were just answered, so that their next calls are in the batch.
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
        except Exception as error:  # noqa: BLE001 - passed on to the caller
            self._roll_back()
            if len(batch) > 1:  # one by one, so that only the failing call is rejected
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
        if not self._loop.is_closed():  # a closed loop has no callers
            self._loop.call_soon_threadsafe(self._take_back, done)

    # -- in the thread that has the connection ------------------------------------------------------

    def _set_pragmas(self, *, durable: bool, checkpoint: bool) -> None:
        """Sets whether the next commit is flushed, and whether it may checkpoint the log."""
        if (durable, checkpoint) != self._pragmas:
            # As a script, which is compiled each time: some pragmas take effect at compile time, not when executed.
            self._connection.executescript(
                f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'};"
                f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES if checkpoint else 0}"
            )
            self._pragmas = (durable, checkpoint)

    def _check_other_writers(self) -> None:
        """Drops the held rows if another process has written since the last check."""
        [version] = self._cursor.execute("PRAGMA data_version").fetchone()
        if version != self._seen_version:
            self._held.clear()
            self._contended_until = time.monotonic() + _CONTENTION_SECONDS if self._seen_version else 0.0
            self._seen_version = version

    def _run(self, batch: Sequence[Job[Any]]) -> BatchResult:
        """Executes the batch between `BEGIN` and `COMMIT`."""
        self._check_file()
        tx = Transaction(self._clock(), self._stamps, alone=True, held=self._held)
        if tx.now >= self._next_expiry:
            # `_next_expiry` is exact for leases of this process; for those of others it is the next periodic check.
            drive(self._cursor, expire(tx))
            self._next_expiry = tx.now + _CHECK_SECONDS
        outcomes = drive(self._cursor, run_all(tx, batch))
        self._next_expiry = min(self._next_expiry, tx.changes.lease)
        return BatchResult(batch, outcomes, tx.changes)

    def _flush(self, done: BatchResult) -> tuple[BatchResult, float]:
        """Flushes the log; returns the outcomes for the callers and the duration."""
        began = time.perf_counter()
        try:
            flush(self._log)
        except OSError as error:
            # The kernel may have dropped the pages that it could not write: a later flush that succeeds proves nothing.
            self._broken = StoreUnavailable(
                f"{self._path}: cannot be flushed to disk; open it again: {error}"
            )
            done = self._refuse(done.jobs, self._broken)
        return done, time.perf_counter() - began

    def _check_file(self) -> None:
        """Fails if the file was deleted or replaced: writes to it would succeed, and never be read."""
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
        """Never raises: a connection that cannot roll back fails the next call."""
        self._held.clear()  # it may have rows of the transaction
        with suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")


def may_flush_in_loop(seconds: float, worked: float) -> bool:
    """Whether the event loop may run the next flushes, after one of `seconds` during which it had `worked` seconds of CPU
    time. That saves the hand-over to the thread and back, which costs about as much as the flush."""
    return seconds <= QUICK_FLUSH_SECONDS and worked < seconds * IDLE_SHARE


def flush(file: int) -> None:
    """Flushes the contents and the length of the file, without its timestamps where the system can."""
    os.fdatasync(file) if hasattr(os, "fdatasync") else os.fsync(file)
