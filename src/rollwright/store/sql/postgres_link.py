"""A connection to PostgreSQL that survives the loss of the server, and the queue of calls for the connections that write."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import asyncpg  # type: ignore[import-untyped]

from rollwright.store.errors import StoreUnavailable
from rollwright.store.outage import Outage
from rollwright.store.sql.driver import Job

MAX_BATCH = 64
"""Most calls in one transaction: they hold their locks until all of them are done."""

RETRY_SECONDS = 60.0
"""A restart of the server takes seconds; a fail-over up to a minute."""
_FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two attempts to connect, doubled each time up to the longest."""
CLOSE_SECONDS = 2.0
"""Time limit of an orderly disconnect; after it the connection is dropped."""

LOST = (
    OSError,
    TimeoutError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
)
"""The server is away, or starting. An `InterfaceError` of a closed connection means the same. An `InternalClientError`
comes from a connection that broke in the middle of a command, and cannot be used any more."""

Result = TypeVar("Result")


class CallQueue:
    """Calls that wait for a writer, which takes all of them, up to a limit.

    Of several idle writers one is woken, the one that was busy last: the server's process behind it has its plans and
    catalogues in the processor's cache still.
    """

    def __init__(self) -> None:
        self._jobs: deque[Job[Any]] = deque()
        self._idle: list[asyncio.Future[None]] = []
        """Writers that wait, the one that was busy last at the end."""
        self._waking = False
        """Whether a writer has been woken that has not taken its calls yet."""
        self._ended = False

    def put(self, job: Job[Any]) -> None:
        self._jobs.append(job)
        self._wake()

    def end(self) -> None:
        self._ended = True
        for idle in self._idle:
            if not idle.done():
                idle.set_result(None)
        self._idle.clear()

    async def take(self) -> list[Job[Any]]:
        """Returns at least one call; an empty list when the queue has ended."""
        while not self._jobs and not self._ended:
            idle = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            await idle
            self._waking = False
        taken = [self._jobs.popleft() for _ in range(min(len(self._jobs), MAX_BATCH))]
        if self._jobs:
            self._wake()
        return taken

    def _wake(self) -> None:
        if self._idle and not self._waking:
            self._waking = True
            self._idle.pop().set_result(None)


class Link:
    """A connection that reconnects after it is lost."""

    def __init__(
        self, connect: Callable[[], Awaitable["asyncpg.Connection"]], patience: float, outage: Outage
    ) -> None:
        self._connect = connect
        self._patience = patience
        self._outage = outage
        self._connection: asyncpg.Connection | None = None
        self.pid: int | None = None
        """The process id of the server's backend."""
        self.patient = True
        """Whether to wait for a server that is away."""

    async def run(self, work: Callable[["asyncpg.Connection", bool], Awaitable[Result]]) -> Result:
        """Runs the work, again after each loss of the connection. The second argument says that an earlier run may have been
        committed."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience
        pause, repeated = _FIRST_PAUSE, False
        while True:
            try:
                if self._connection is None:
                    self._connection = await self._connect()
                    self.pid = self._connection.get_server_pid()
                    self._outage.is_over()
                return await work(self._connection, repeated)
            except (*LOST, asyncpg.InterfaceError) as error:
                if not self._is_lost(error):
                    raise
                repeated = repeated or self._connection is not None
                self.drop()
                if loop.time() > give_up or not self.patient:
                    raise StoreUnavailable(f"PostgreSQL does not answer: {error}") from None
                self._outage.lasts(f"does not answer: {error}", loop.time(), give_up - loop.time())
            except asyncio.CancelledError:
                self.drop()  # it is in the middle of a command
                raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _is_lost(self, error: Exception) -> bool:
        """Whether the connection is lost: an `InterfaceError` of an open one is a wrong call, and not retried."""
        return isinstance(error, LOST) or self._connection is None or self._connection.is_closed()

    def drop(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(*LOST, asyncpg.InterfaceError):
                await self._connection.close(timeout=CLOSE_SECONDS)
        self.drop()
