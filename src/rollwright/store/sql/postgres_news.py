"""Notifications of commits between the processes that share a PostgreSQL database.

A commit is announced after it, on the connection that also listens: a transaction that notifies would hold a lock of the
whole server until it is flushed. The first change is announced immediately, those within the next `NOTIFY_SECONDS`
together. A process that is killed between a commit and its announcement announces nothing, so waiting calls also look
again every `RECHECK_SECONDS`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg  # type: ignore[import-untyped]

from rollwright.store.sql.postgres_link import CLOSE_SECONDS, LONGEST_PAUSE, LOST
from rollwright.store.sql.transaction import Changes

NOTIFY_SECONDS = 0.01
"""Shortest interval between two announcements of one process."""
RECHECK_SECONDS = 1.0
"""How often waiting calls look without a notification."""

_LETTERS = {"w": "waiting", "c": "completed", "t": "taken"}


class Notifications:
    """Announces the changes of this process on `channel`, and reports those of the others to `on_change`."""

    def __init__(
        self,
        connect: Callable[[], Awaitable["asyncpg.Connection"]],
        channel: str,
        on_change: Callable[[Changes], None],
        has_waiters: Callable[[], bool],
    ) -> None:
        self._connect = connect
        self._channel = channel
        self._on_change = on_change
        self._has_waiters = has_waiters
        self._news = ""
        """Letters of the changes that are not announced yet."""
        self._stirred = asyncio.Event()
        """There is something to announce, or the connection is lost, or the store is closing."""
        self._closing = False
        self._task = asyncio.create_task(self._run())

    def announce(self, changes: Changes) -> None:
        news = "".join(letter for letter, name in _LETTERS.items() if getattr(changes, name))
        if news:
            self._news += "".join(letter for letter in news if letter not in self._news)
            self._stirred.set()

    async def close(self) -> None:
        """Announces what is left, unless the server is away."""
        self._closing = True
        self._stirred.set()
        await asyncio.wait({self._task}, timeout=CLOSE_SECONDS if self._news else 0)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while not self._closing:
            try:
                connection = await self._connect()
            except (*LOST, asyncpg.InterfaceError):
                await asyncio.sleep(LONGEST_PAUSE)
                continue
            try:
                await self._serve(connection)
            except (*LOST, asyncpg.InterfaceError):
                continue
            finally:
                connection.terminate()

    async def _serve(self, connection: "asyncpg.Connection") -> None:
        own = connection.get_server_pid()

        def receive(_: Any, pid: int, channel: str, news: str) -> None:
            if pid != own:
                self._on_change(Changes(**{name: letter in news for letter, name in _LETTERS.items()}))

        connection.add_termination_listener(lambda _: self._stirred.set())
        await connection.add_listener(self._channel, receive)
        clock = asyncio.get_running_loop().time
        next_check = clock()  # at once: changes of the time without a connection were missed
        while not connection.is_closed():
            if clock() >= next_check:
                next_check = clock() + RECHECK_SECONDS
                if self._has_waiters():
                    self._on_change(Changes(waiting=True, completed=True, taken=True))
            if self._news:
                news, self._news = self._news, ""
                await connection.execute("SELECT pg_notify($1, $2)", self._channel, news)
                await asyncio.sleep(0 if self._closing else NOTIFY_SECONDS)
            elif self._closing:
                return
            await self._wait(next_check - clock())

    async def _wait(self, seconds: float) -> None:
        if self._news or self._closing:
            return
        self._stirred.clear()
        try:
            await asyncio.wait_for(self._stirred.wait(), max(seconds, 0.0))
        except TimeoutError:
            return
