"""The PostgreSQL driver: a few connections write, others read, and one exchanges notifications of commits.

Writes queue while the writers are busy, and the next free writer takes all of them. Those of the usual kinds run as one
statement for each kind (`postgres_batches`), the others together in one transaction. Rows are locked as they are read
(`FOR UPDATE`, with `SKIP LOCKED` where another transaction's rows are not needed), so any number of processes on any
number of machines can share the database. One transaction at a time ends expired leases: another one that finds some
waits for its commit, so a claim never misses a rollout that is being requeued at that moment.

After a connection is lost the driver reconnects and runs the transaction again, for up to `RETRY_SECONDS`: a restart of
the server is a pause, not a failure. The outcome of a commit whose answer was lost is unknown; the operations may be
repeated.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import asyncpg  # type: ignore[import-untyped]
from sqlalchemy import func, select

from rollwright.addresses import canonical, redacted, scrubbed
from rollwright.store.errors import StoreError, StoreUnavailable
from rollwright.store.outage import Outage
from rollwright.store.sql.changes import expire
from rollwright.store.sql.driver import BatchedCall, Job, Outcome, Read, Write, answer, run_all
from rollwright.store.sql.migrate import READ_VERSION, VERSION_TABLE, missing_steps
from rollwright.store.sql.postgres_batches import BATCHES, NOT_DONE, Given, Run
from rollwright.store.sql.postgres_link import LOST, RETRY_SECONDS, CallQueue, Link
from rollwright.store.sql.postgres_news import Notifications
from rollwright.store.sql.postgres_recent import RecentClaims, StatementNews
from rollwright.store.sql.postgres_statements import SETTINGS
from rollwright.store.sql.schema import HELD, rollouts
from rollwright.store.sql.statements import NOW, Dialect, Operation, Row, Statement
from rollwright.store.sql.transaction import Changes, Stamps, Transaction
from rollwright.store.transitions import lapsed

WRITERS = {True: 2, False: 1}
"""Connections for durable writes, one of which is flushed while the other executes, and for the others, which are never
flushed. More would only compete for the CPU of this process."""
READERS = 2

CONNECT_SECONDS = 10.0
COMMAND_SECONDS = 60.0
"""Time limit of a statement: the slowest ones take milliseconds, so the server is lost."""

_MIGRATION_LOCK = 0x726F6C6C
"""Advisory lock of migrations; an arbitrary number that other programs are unlikely to use."""
_EXPIRY_LOCK = 0x6C656173
"""Advisory lock, with the schema's name, of the transaction that ends leases. It is taken before any row lock, so a
transaction that waits for it cannot block its holder."""

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
        self._recent = RecentClaims(self.stamps)
        self.where = redacted(url)
        self._on_change: Callable[[Changes], None] = lambda changes: None
        self._queues = {True: CallQueue(), False: CallQueue()}
        """Pending durable writes under `True`, other writes under `False`."""
        self._writers: list[asyncio.Task[None]] = []
        self._notifications: Notifications | None = None
        self._links: list[Link] = []
        self._idle_readers: asyncio.LifoQueue[Link] = asyncio.LifoQueue()
        self._closing = False

    def _start(self) -> None:
        for durable, queue in self._queues.items():
            for _ in range(WRITERS[durable]):
                commit = {"synchronous_commit": "on" if durable else "off"}
                link = self._new_link(SETTINGS | commit)
                self._writers.append(asyncio.create_task(self._serve(link, queue)))
        for _ in range(READERS):
            self._idle_readers.put_nowait(self._new_link({}))

    def _new_link(self, settings: Mapping[str, str]) -> Link:
        link = Link(partial(self._connect, settings), self._patience, self._outage)
        self._links.append(link)
        return link

    async def _connect(self, settings: Mapping[str, str] | None = None) -> "asyncpg.Connection":
        return await asyncpg.connect(
            self._url,
            timeout=CONNECT_SECONDS,
            command_timeout=COMMAND_SECONDS,
            statement_cache_size=256,
            max_cached_statement_lifetime=0,
            server_settings={
                "search_path": self._schema,
                "application_name": "rollwright",
                **(settings or {}),
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
        if type(make) is BatchedCall and make.recall is not None:
            result = self._recent.recall(make.recall, make.argument)
            if result is not None:
                future.set_result(result)
                return future
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

    async def _serve(self, link: Link, queue: CallQueue) -> None:
        while batch := await queue.take():
            kinds: dict[Run | None, list[Job[Any]]] = {}
            for job in batch:
                run = BATCHES.get(job.make.run) if type(job.make) is BatchedCall else None
                kinds.setdefault(run, []).append(job)
            others = kinds.pop(None, [])
            for run, jobs in kinds.items():
                assert run is not None
                others += await self._run_together(link, run, jobs)
            if others:
                await self._commit(link, others)

    async def _run_together(self, link: Link, run: Run, batch: Sequence[Job[Any]]) -> list[Job[Any]]:
        """Runs calls of one kind as one statement; returns those that need a transaction."""
        arguments = [job.make.argument for job in batch]  # type: ignore[attr-defined]
        lost = False

        async def work(connection: "asyncpg.Connection", repeated: bool) -> Given:
            nonlocal lost
            lost = repeated
            if repeated:  # the statement may have been committed: only an operation knows how to repeat it
                return [NOT_DONE] * len(batch), Changes()
            sent, news = self._recent.sending(), StatementNews(self.stamps)
            given = await run(connection, news, arguments)
            self._recent.learn(sent, news)
            return given

        try:
            results, changes = await link.run(work)
        except Exception as error:  # noqa: BLE001 - the transaction meets the same error, and isolates the failing call
            if not isinstance(error, StoreUnavailable):
                return list(batch)
            answer(batch, [(None, error)] * len(batch))
            return []
        if lost:
            await self._commit(link, batch, repeated=True)
            return []
        done = [
            (job, (result, None))
            for job, result in zip(batch, results, strict=True)
            if result is not NOT_DONE
        ]
        answer([job for job, _ in done], [outcome for _, outcome in done])
        self._announce(changes)
        return [job for job, result in zip(batch, results, strict=True) if result is NOT_DONE]

    async def _commit(self, link: Link, batch: Sequence[Job[Any]], *, repeated: bool = False) -> None:
        """Runs the calls in one transaction. `repeated`: they ran before, with an unknown outcome."""
        outcomes: list[Outcome]
        changes = Changes()
        try:
            try:
                outcomes, changes = await link.run(
                    lambda connection, again: self._transaction(connection, batch, repeated or again)
                )
            finally:
                self._recent.clear()  # before any caller is answered
        except CONFLICT:
            for job in batch:  # alone, each call locks its rows in one order and cannot deadlock
                await self._commit(link, [job], repeated=repeated)
            return
        except Exception as error:  # noqa: BLE001 - passed on to the caller
            if len(batch) > 1 and not isinstance(error, StoreUnavailable):
                for job in batch:  # one by one, so that only the failing call is rejected
                    await self._commit(link, [job], repeated=repeated)
                return
            outcomes = [(None, _as_store_error(error))] * len(batch)
        answer(batch, outcomes)
        self._announce(changes)

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
        return outcomes, tx.changes

    # -- notifications ------------------------------------------------------------------------------

    def watch(self, on_change: Callable[[Changes], None], has_waiters: Callable[[], bool]) -> None:
        self._on_change = on_change
        connect = partial(self._connect, {"synchronous_commit": "off"})  # a notification has nothing to flush
        self._notifications = Notifications(connect, self._schema, self._hear, has_waiters)

    def _hear(self, changes: Changes) -> None:
        """Changes of other processes."""
        if changes.taken:
            self._recent.clear()
        self._on_change(changes)

    def _announce(self, changes: Changes) -> None:
        self._on_change(changes)
        if self._notifications is not None:
            self._notifications.announce(changes)

    async def close(self) -> None:
        self._closing = True
        for queue in self._queues.values():
            queue.end()
        for link in self._links:
            link.patient = False
        await asyncio.gather(*self._writers, return_exceptions=True)
        if self._notifications is not None:
            await self._notifications.close()
        for link in self._links:
            await link.close()


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


def _cannot_be_opened(url: str, error: Exception) -> str:
    words = " ".join(scrubbed(str(error), url).split()) or type(error).__name__
    missing = isinstance(error, asyncpg.InvalidPasswordError | asyncpg.InvalidAuthorizationSpecificationError)
    hint = "; PGPASSWORD or a password file gives the password" if missing else ""
    return f"{redacted(url)} cannot be opened as a store: {words}{hint}"


TAKE_TURN = "SELECT pg_advisory_xact_lock($1, hashtext($2))"
PULSE = Statement(select(NOW, select(func.min(rollouts.c.lease_expires)).where(HELD).scalar_subquery()))
