"""What a SQL store needs of a database: two ways to run operations, and word of changes."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from rollwright.store.sql.statements import Operation
from rollwright.store.sql.transaction import Changes, Stamps, Transaction

Result = TypeVar("Result")
Write = Callable[[Transaction], Operation[Result]]
"""Makes the operation anew each time it is called: a transaction that failed is run again."""
Read = Callable[[], Operation[Result]]


class Driver(Protocol):
    stamps: Stamps
    """Of its workers, not yet written."""

    async def write(self, make: Write[Result], *, lasting: bool) -> Result:
        """Runs the operation in a transaction, alone or with others, and returns when it is committed.

        `lasting`: it must survive a power cut, not only the death of every process. What is not, such as a claim
        or a heartbeat, is as if it had never happened if the power fails: the rollout is given out again. Every
        transaction first ends the attempts whose lease is over.
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

    async def close(self) -> None: ...


def nothing(tx: Transaction) -> Operation[None]:
    """A transaction that only ends the leases that are over."""
    yield from ()
