"""What a SQL store needs of a database: two ways to run operations, and word of changes."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from rollwright.store.sql.statements import Operation
from rollwright.store.sql.transaction import Changes, Stamps, Transaction

Result = TypeVar("Result")
Write = Callable[[Transaction], Operation[Result]]
"""Makes the operation anew each time it is called: a transaction that failed is run again."""
Read = Callable[[], Operation[Result]]


Outcome = tuple[Any, BaseException | None]
"""A result, or what went wrong instead."""


class Job(NamedTuple, Generic[Result]):
    """A call that waits to be run."""

    make: Callable[..., Operation[Result]]
    future: "asyncio.Future[Result]"
    lasting: bool = False
    orphaned: Callable[[Result], None] | None = None


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

    async def write(
        self, make: Write[Result], *, lasting: bool, orphaned: Callable[[Result], None] | None = None
    ) -> Result:
        """Runs the operation in a transaction, alone or with others, and returns when it is committed.

        `lasting`: it must survive a power cut, not only the death of every process. What is not, such as a claim
        or a heartbeat, is as if it had never happened if the power fails: the rollout is given out again.
        `orphaned` gets the result if the caller was cancelled while it waited. Every transaction first ends the
        attempts whose lease is over.
        """
        ...

    async def read(self, make: Read[Result]) -> Result:
        """Runs an operation that changes nothing."""
        ...

    def watch(self, on_change: Callable[[Changes], None], waited_for: Callable[[], bool]) -> None:
        """Calls `on_change` in the event loop for what this or any other process commits.

        What others commit may be looked for less often while `waited_for()` is false.
        """
        ...

    async def close(self) -> None:
        """Does what was asked for before, unless the database is away, and lets go of it."""
        ...


def nothing(tx: Transaction) -> Operation[None]:
    """A transaction that only ends the leases that are over."""
    yield from ()
