"""The PostgreSQL driver: a few connections write, others read, and one listens for notifications of commits.

Writes queue while the writers are busy, and the next free writer runs all of them in one transaction. Rows are locked
as they are read (`FOR UPDATE`, with `SKIP LOCKED` where another transaction's rows are not needed), so any number of
processes on any number of machines can share the database. Each commit announces with `NOTIFY` the changes that waiting
calls depend on. One transaction at a time ends expired leases: another one that finds some waits for its commit, so a
claim never misses a rollout that is being requeued at that moment.

After a connection is lost the driver reconnects and runs the transaction again, for up to `RETRY_SECONDS`: a restart of
the server is a pause, not a failure. The outcome of a commit whose answer was lost is unknown; the operations may be
repeated.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import asyncpg  # type: ignore[import-untyped]
from sqlalchemy import func, select

from rollwright.addresses import canonical, redacted, scrubbed
from rollwright.store.errors import StoreError, StoreUnavailable
from rollwright.store.outage import Outage
from rollwright.store.sql.changes import expire
from rollwright.store.sql.driver import Job, Outcome, Read, Write, answer, run_all
from rollwright.store.sql.migrate import READ_VERSION, VERSION_TABLE, missing_steps
from rollwright.store.sql.schema import HELD, rollouts
from rollwright.store.sql.statements import NOW, Dialect, Operation, Row, Statement
from rollwright.store.sql.transaction import Changes, Stamps, Transaction
from rollwright.store.transitions import lapsed

WRITERS = 2
"""Connections for durable writes, and as many for other writes. One commits while the other executes statements; more
would only compete for the CPU of this process."""
READERS = 2

MAX_BATCH = 64
"""Most calls in one transaction: they hold their locks until all of them are done."""

RETRY_SECONDS = 60.0
"""A restart of the server takes seconds; a fail-over up to a minute."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two attempts to connect, doubled each time up to the longest."""
CONNECT_SECONDS = 10.0
COMMAND_SECONDS = 60.0
"""Time limit of a statement: the slowest ones take milliseconds, so the server is lost."""

_CLOSE_SECONDS = 2.0
"""Time limit of an orderly disconnect; after it the connection is dropped."""

_MIGRATION_LOCK = 0x726F6C6C
"""Advisory lock of migrations; an arbitrary number that other programs are unlikely to use."""
_EXPIRY_LOCK = 0x6C656173
"""Advisory lock, with the schema's name, of the transaction that ends leases. It is taken before any row lock, so a
transaction that waits for it cannot block its holder."""

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
NOT_TEXT = (asyncpg.DataError, asyncpg.CharacterNotInRepertoireError, UnicodeEncodeError)
"""PostgreSQL's text type accepts no zero characters and no lone surrogates."""
CONFLICT = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)
"""PostgreSQL aborted one of two transactions that waited for each other."""

Result = TypeVar("Result")


async def drive(connection: "asyncpg.Connection", operation: Operation[Result]) -> Result:
    """Runs an operation to its end: executes each statement that it yields, and sends it the rows."""
    try:
        statement, values = next(operation)
        while True:
            compiled = statement.postgresql
            arguments = list(compiled.arguments(values))
            rows: list[Row] = []
            if len(arguments) == 1:
                rows = await connection.fetch(compiled.sql, *arguments[0])
            elif compiled.returns_rows:
                rows = await connection.fetchmany(compiled.sql, arguments)
            else:
                await connection.executemany(compiled.sql, arguments)
            statement, values = operation.send(rows)
    except StopIteration as stop:
        result: Result = stop.value
        return result


class PostgresDriver:
    """Belongs to the event loop that it was opened in."""

    repeats = True

    @classmethod
    async def open(
        cls,
        url: str,
        schema: str = "rollwright",
        *,
        patience: float = RETRY_SECONDS,
        on_outage: Callable[[str], None] | None = None,
    ) -> "PostgresDriver":
        """The tables are in a schema of their own, which is created if it does not exist.

        `patience`: seconds to wait for a server that is away; `on_outage` gets a message meanwhile.
        """
        driver = cls(url, schema, patience, Outage(redacted(url), on_outage))
        try:
            await _prepare(await driver._connect(), schema, redacted(url))
        except (*LOST, asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
            raise StoreError(_cannot_be_opened(url, error)) from None
        driver._start()
        return driver

    def __init__(self, url: str, schema: str, patience: float, outage: Outage) -> None:
        self._patience = patience
        self._outage = outage
        self._url = canonical(url)
        self._schema = schema
        self.stamps = Stamps()
        self.where = redacted(url)
        self._on_change: Callable[[Changes], None] = lambda changes: None
        self._queues = {True: _Queue(), False: _Queue()}
        """Pending durable writes under `True`, other writes under `False`."""
        self._writers: list[asyncio.Task[None]] = []
        self._listener: asyncio.Task[None] | None = None
        self._links: list[_Link] = []
        self._idle_readers: asyncio.LifoQueue[_Link] = asyncio.LifoQueue()
        self._closing = False

    def _start(self) -> None:
        for durable, queue in self._queues.items():
            for _ in range(WRITERS):
                link = self._new_link(durable)
                self._writers.append(asyncio.create_task(self._serve(link, queue)))
        for _ in range(READERS):
            self._idle_readers.put_nowait(self._new_link(True))

    def _new_link(self, durable: bool) -> "_Link":
        link = _Link(partial(self._connect, durable), self._patience, self._outage)
        self._links.append(link)
        return link

    async def _connect(self, durable: bool = True) -> "asyncpg.Connection":
        return await asyncpg.connect(
            self._url,
            timeout=CONNECT_SECONDS,
            command_timeout=COMMAND_SECONDS,
            statement_cache_size=256,
            max_cached_statement_lifetime=0,
            server_settings={
                "search_path": self._schema,
                "application_name": "rollwright",
                "synchronous_commit": "on" if durable else "off",
            },
        )

    # -- running operations -------------------------------------------------------------------------

    def write(
        self,
        make: Write[Result],
        *,
        durable: bool,
        brief: bool = False,
        orphaned: Callable[[Result], None] | None = None,
    ) -> "asyncio.Future[Result]":
        if self._closing:
            raise StoreError("the store is closed")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queues[durable].put(Job(make, future, durable, brief, orphaned))
        return future

    async def read(self, make: Read[Result]) -> Result:
        link = await self._idle_readers.get()
        try:
            return await link.run(lambda connection, _: drive(connection, make()))
        except NOT_TEXT as error:
            raise _as_store_error(error) from error
        finally:
            self._idle_readers.put_nowait(link)

    async def _serve(self, link: "_Link", queue: "_Queue") -> None:
        while batch := await queue.take():
            await self._commit(link, batch)

    async def _commit(self, link: "_Link", batch: Sequence[Job[Any]]) -> None:
        outcomes: list[Outcome]
        changes = Changes()
        try:
            outcomes, changes = await link.run(
                lambda connection, repeated: self._transaction(connection, batch, repeated)
            )
        except CONFLICT:
            for job in batch:  # alone, each call locks its rows in one order and cannot deadlock
                await self._commit(link, [job])
            return
        except Exception as error:  # noqa: BLE001 - passed on to the caller
            if len(batch) > 1 and not isinstance(error, StoreUnavailable):
                for job in batch:  # one by one, so that only the failing call is rejected
                    await self._commit(link, [job])
                return
            outcomes = [(None, _as_store_error(error))] * len(batch)
        answer(batch, outcomes)
        self._on_change(changes)

    async def _transaction(
        self, connection: "asyncpg.Connection", batch: Sequence[Job[Any]], repeated: bool
    ) -> tuple[list[Outcome], Changes]:
        async with connection.transaction():
            [(now, lease)] = await connection.fetch(PULSE.postgresql.sql)
            if lapsed(lease, now):
                await connection.execute(TAKE_TURN, _EXPIRY_LOCK, self._schema)
                [(now, lease)] = await connection.fetch(PULSE.postgresql.sql)
            tx = Transaction(now, self.stamps, repeated)
            if lapsed(lease, now):
                await drive(connection, expire(tx))
            outcomes = await drive(connection, run_all(tx, batch))
            if news := _payload(tx.changes):
                await connection.execute("SELECT pg_notify($1, $2)", self._schema, news)
        return outcomes, tx.changes

    # -- notifications ------------------------------------------------------------------------------

    def watch(self, on_change: Callable[[Changes], None], has_waiters: Callable[[], bool]) -> None:
        self._on_change = on_change
        self._listener = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        """Keeps a connection that listens; after each reconnect all waiting calls are woken, which may have missed a change."""

        def receive(connection: Any, pid: int, channel: str, news: str) -> None:
            if pid not in [link.pid for link in self._links]:
                self._on_change(_changes(news))

        while True:
            lost = asyncio.Event()
            try:
                connection = await self._connect()
            except LOST:
                await asyncio.sleep(_LONGEST_PAUSE)
                continue
            try:
                connection.add_termination_listener(lambda _, lost=lost: lost.set())
                await connection.add_listener(self._schema, receive)
                self._on_change(Changes(waiting=True, completed=True, taken=True))
                await lost.wait()
            except LOST:
                pass
            finally:
                connection.terminate()

    async def close(self) -> None:
        self._closing = True
        for queue in self._queues.values():
            queue.end()
        for link in self._links:
            link.patient = False
        await asyncio.gather(*self._writers, return_exceptions=True)
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        for link in self._links:
            await link.close()


class _Queue:
    """Calls that wait for a writer, which takes all of them, up to a limit."""

    def __init__(self) -> None:
        self._jobs: deque[Job[Any]] = deque()
        self._arrived = asyncio.Event()
        self._ended = False

    def put(self, job: Job[Any]) -> None:
        self._jobs.append(job)
        self._arrived.set()

    def end(self) -> None:
        self._ended = True
        self._arrived.set()

    async def take(self) -> list[Job[Any]]:
        """Returns at least one call; an empty list when the queue has ended."""
        while not self._jobs and not self._ended:
            self._arrived.clear()
            await self._arrived.wait()
        return [self._jobs.popleft() for _ in range(min(len(self._jobs), MAX_BATCH))]


class _Link:
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
            pause = min(2 * pause, _LONGEST_PAUSE)

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
                await self._connection.close(timeout=_CLOSE_SECONDS)
        self.drop()


async def _prepare(connection: "asyncpg.Connection", schema: str, where: str) -> None:
    """Creates or migrates the tables."""
    try:
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock($1)", _MIGRATION_LOCK)
            quoted = schema.replace('"', '""')
            await connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{quoted}"')
            known = await connection.fetchval(
                "SELECT to_regclass($1) IS NOT NULL", f'"{quoted}".{VERSION_TABLE}'
            )
            version = await connection.fetchval(READ_VERSION) if known else None
            if steps := missing_steps(Dialect.POSTGRESQL, version, where):
                await connection.execute(steps)
    finally:
        connection.terminate()


def _as_store_error(error: Exception) -> Exception:
    return StoreError(f"a text that cannot be stored: {error}") if isinstance(error, NOT_TEXT) else error


_NEWS = {"w": "waiting", "c": "completed", "t": "taken"}


def _payload(changes: Changes) -> str:
    """The payload for other processes: one letter for each kind of change."""
    return "".join(letter for letter, name in _NEWS.items() if getattr(changes, name))


def _changes(news: str) -> Changes:
    return Changes(**{name: letter in news for letter, name in _NEWS.items()})


def _cannot_be_opened(url: str, error: Exception) -> str:
    words = " ".join(scrubbed(str(error), url).split()) or type(error).__name__
    missing = isinstance(error, asyncpg.InvalidPasswordError | asyncpg.InvalidAuthorizationSpecificationError)
    hint = "; PGPASSWORD or a password file gives the password" if missing else ""
    return f"{redacted(url)} cannot be opened as a store: {words}{hint}"


TAKE_TURN = "SELECT pg_advisory_xact_lock($1, hashtext($2))"
PULSE = Statement(select(NOW, select(func.min(rollouts.c.lease_expires)).where(HELD).scalar_subquery()))
