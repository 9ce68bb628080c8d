"""What a SQL store needs of a database: two ways to run operations, and word of changes.

Calls that share a transaction run in the order in which they came. Neighbours of one kind (`BatchedCall`) are run as one
operation, with a statement for all of them instead of one for each.
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
"""Makes the operation anew each time it is called: a transaction that failed is run again."""
Read = Callable[[], Operation[Result]]


Outcome = tuple[Any, BaseException | None]
"""A result, or what went wrong instead."""


class BatchedCall(msgspec.Struct, Generic[Argument, Result], frozen=True):
    """A call that can be run with others of its kind."""

    run: Callable[[Transaction, Sequence[Argument]], Operation[Sequence[Result | StoreError]]]
    """Gives a result for each argument, or why that one is refused; the others are not touched by it."""
    argument: Argument
    recall: Callable[[Transaction, Argument], Result | None] | None = None
    """Gives the result, if what the transaction remembers tells it and nothing is to be written."""

    def __call__(self, tx: Transaction) -> Operation[Result]:
        [result] = yield from self.run(tx, [self.argument])
        if isinstance(result, StoreError):
            raise result
        return result


class Job(msgspec.Struct, Generic[Result], frozen=True):
    """A call that waits to be run."""

    make: Callable[..., Operation[Result]]
    future: "asyncio.Future[Result]"
    durable: bool = False
    brief: bool = False
    orphaned: Callable[[Result], None] | None = None


def run_all(tx: Transaction, batch: Sequence[Job[Any]]) -> Operation[list[Outcome]]:
    """All calls of a transaction, and what it has gathered at its end."""
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
    """Whether an operation may be run twice, because it cannot be known if the first time was committed."""
    stamps: Stamps
    """Of its workers, not yet written."""
    where: str
    """The database, for messages."""

    def write(
        self,
        make: Write[Result],
        *,
        durable: bool,
        brief: bool = False,
        orphaned: Callable[[Result], None] | None = None,
    ) -> "asyncio.Future[Result]":
        """Runs the operation in a transaction, alone or with others, and returns when it is committed.

        `durable`: it must survive a power cut, not only the death of every process. What is not, such as a claim
        or a heartbeat, is as if it had never happened if the power fails: the rollout is given out again.
        `brief`: it touches a handful of rows, so a driver without a server may run it in the event loop itself.
        `orphaned` gets the result if the caller was cancelled while it waited. A transaction first ends the
        attempts whose lease is over, if it is time to look for them.
        """
        ...

    def read(self, make: Read[Result]) -> Awaitable[Result]:
        """Runs an operation that changes nothing."""
        ...

    def watch(self, on_change: Callable[[Changes], None], has_waiters: Callable[[], bool]) -> None:
        """Calls `on_change` in the event loop for what this or any other process commits.

        What others commit may be looked for less often while `has_waiters()` is false.
        """
        ...

    async def close(self) -> None:
        """Does what was asked for before, unless the database is away, and lets go of it."""
        ...
