"""The interface between a SQL store and a database: writes, reads, and notifications of changes.

Calls that share a transaction run in the order of their arrival. Consecutive calls of one kind (`BatchedCall`) run as
one operation, with one statement for all of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from rollwright.store.errors import StoreError
from rollwright.store.sql.statements import Operation
from rollwright.store.sql.transaction import Changes, Stamps, Transaction

Result = TypeVar("Result")
Argument = TypeVar("Argument")
Write = Callable[[Transaction], Operation[Result]]
"""Returns a new operation each time: a transaction that failed is run again."""
Read = Callable[[], Operation[Result]]


Outcome = tuple[Any, BaseException | None]
"""A result, or an error."""


class BatchedCall(msgspec.Struct, Generic[Argument, Result], frozen=True):
    """A call that can run together with others of its kind, as one operation."""

    run: Callable[[Transaction, Sequence[Argument]], Operation[Sequence[Result | StoreError]]]
    """Returns a result or an error for each argument; an error of one has no effect on the others."""
    argument: Argument
    recall: Callable[[Transaction, Argument], Result | None] | None = None
    """Returns the result if it follows from the held rows and nothing has to be written, else `None`."""

    def __call__(self, tx: Transaction) -> Operation[Result]:
        [result] = yield from self.run(tx, [self.argument])
        if isinstance(result, StoreError):
            raise result
        return result


class Job(msgspec.Struct, Generic[Result], frozen=True):
    """A call that waits for execution; the fields are those of `Driver.write`."""

    make: Callable[..., Operation[Result]]
    future: "asyncio.Future[Result]"
    durable: bool = False
    brief: bool = False
    orphaned: Callable[[Result], None] | None = None


def run_all(tx: Transaction, batch: Sequence[Job[Any]]) -> Operation[list[Outcome]]:
    """Runs all calls of a transaction, then writes the rows that they gathered."""
    outcomes: list[Outcome] = []
    first = 0
    while first < len(batch):
        make, after = batch[first].make, first + 1
        if type(make) is not BatchedCall:
            try:
                outcomes.append(((yield from make(tx)), None))
            except StoreError as refusal:
                outcomes.append((None, refusal))
        else:
            run, arguments = make.run, [make.argument]
            while after < len(batch) and type(other := batch[after].make) is BatchedCall and other.run is run:
                arguments.append(other.argument)
                after += 1
            for each in (yield from run(tx, arguments)):
                outcomes.append((None, each) if isinstance(each, StoreError) else (each, None))
        first = after
    yield from tx.write_gathered()
    return outcomes


def answer(jobs: Sequence[Job[Any]], outcomes: Sequence[Outcome]) -> None:
    """Sets the futures of the calls."""
    for job, (result, error) in zip(jobs, outcomes, strict=True):
        if job.future.done():  # the caller was cancelled
            if job.orphaned is not None and error is None:
                job.orphaned(result)
        elif error is None:
            job.future.set_result(result)
        else:
            job.future.set_exception(error)


class Driver(Protocol):
    repeats: bool
    """Whether an operation may run twice, because the outcome of a commit on a lost connection is unknown."""
    stamps: Stamps
    """Signs of life of workers that are not yet written."""
    where: str
    """The database's address for messages."""

    def write(
        self,
        make: Write[Result],
        *,
        durable: bool,
        brief: bool = False,
        orphaned: Callable[[Result], None] | None = None,
    ) -> "asyncio.Future[Result]":
        """Runs the operation in a transaction, alone or with others, and returns when it is committed.

        `durable`: the commit must survive a power cut, not only the death of every process. A power cut can take back
        other commits, such as claims and heartbeats, unless a durable one followed.
        `brief`: it touches a handful of rows, so a driver without a server may run it in the event loop itself.
        `orphaned` gets the result if the caller was cancelled while it waited. A transaction first ends expired leases, if
        it is time to look for them.
        """
        ...

    def read(self, make: Read[Result]) -> Awaitable[Result]:
        """Runs a read-only operation."""
        ...

    def watch(self, on_change: Callable[[Changes], None], has_waiters: Callable[[], bool]) -> None:
        """Calls `on_change` in the event loop for the commits of this and every other process.

        Commits of other processes may be polled for less often while `has_waiters()` is false.
        """
        ...

    async def close(self) -> None:
        """Finishes the calls from before, unless the database is away, and closes the connections."""
        ...
