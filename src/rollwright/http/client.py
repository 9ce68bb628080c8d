"""Requests to any number of servers over a pool of kept connections.

Always true: a request is sent once and ends, within its time, with the response or with one `HttpFault`. The most recently
used connection is taken first, so surplus connections grow old and are closed. A request that is cancelled or too slow
takes its connection with it. A client belongs to the event loop of its first request.
"""

import asyncio
import errno
import os
import re
import socket
import ssl
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

from rollwright.aio import TimeoutQueue, timeout_queue
from rollwright.errors import ConfigError
from rollwright.http.connection import Connection, HttpResponse, TimedOut, Unreachable
from rollwright.http.url import Resolver, Url

CONNECT_SECONDS = 10.0
"""A host that does not accept a connection for so long is down, not busy."""

MAX_ANSWER = 1024**3
"""Bytes of a response whose caller sets no limit: a larger one is a mistake and could exhaust the memory."""

_TRANSFER_HEADERS = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "expect", "upgrade"}
)
"""Headers that describe how the bytes are sent, which only this client decides."""

_CLOSING_STEPS = 3
"""Iterations of the event loop until a closed connection has released its socket, also under TLS."""

_BODILESS = frozenset({"GET", "HEAD"})

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class HttpClient:
    """A pool of connections; see the module's docstring for its guarantees."""

    def __init__(
        self,
        headers: Mapping[str, str],
        *,
        keep_alive: float,
        connect_seconds: float = CONNECT_SECONDS,
        socket_path: str | None = None,
        tls: ssl.SSLContext | None = None,
        max_answer: int = MAX_ANSWER,
    ) -> None:
        """`headers`: sent with every request. `keep_alive`: seconds for which an idle connection is kept. `socket_path`: the
        Unix socket that all requests go through. `tls`: the context for https; by default the system's certificates."""
        self._headers = _header_lines(headers)
        self._keep_alive = keep_alive
        self._connect_seconds = connect_seconds
        self._socket_path = socket_path
        self._tls = tls
        self._max_answer = max_answer
        self._resolver = Resolver()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._open: set[Connection] = set()
        self._idle: dict[tuple[str, str], deque[Connection]] = {}
        """By scheme and authority, the longest idle connection first."""
        self._sweep: asyncio.TimerHandle | None = None

    async def request(
        self,
        method: str,
        url: Url,
        body: bytes | None,
        seconds: float,
        *,
        max_answer: int | None = None,
        header_lines: str = "",
    ) -> HttpResponse:
        """Send a request. `seconds`: for the whole request, connecting included. `max_answer`: most bytes of the response with
        its head; `None`: the client's limit. `header_lines`: of this request alone, each with its end of line."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        connection = self._take(loop, url)
        if connection is not None:
            timeouts = timeout_queue(loop, seconds)
        else:
            end = loop.time() + seconds
            connection = await self._connect(loop, url, min(seconds, self._connect_seconds))
            # What is left after connecting is a length of its own, so it gets a queue that is used once.
            timeouts = TimeoutQueue(loop, end - loop.time(), once=True)
        pending = connection.ask(
            self._encode(method, url, body, header_lines),
            head_only=method == "HEAD",
            timeouts=timeouts,
            seconds=seconds,
            max_answer=self._max_answer if max_answer is None else max_answer,
        )
        try:
            return await pending
        except BaseException:
            if pending.done() and not pending.cancelled():
                # Retrieved, or asyncio logs it as lost when this task is cancelled in the same moment.
                pending.exception()
            else:
                connection.abort()
            raise

    async def close(self) -> None:
        """Close all connections; a request under way and every later one ends as `Unreachable`."""
        self._closed = True
        self._idle.clear()
        if self._loop is None or self._loop.is_closed():
            self._open.clear()  # their sockets ended with the loop
            return
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._open):
            connection.abort()
        for _ in range(_CLOSING_STEPS):
            await asyncio.sleep(0)

    def _encode(self, method: str, url: Url, body: bytes | None, more: str) -> bytes:
        head = f"{method} {url.target} HTTP/1.1\r\nHost: {url.authority}\r\n{self._headers}{more}"
        if body is None and method in _BODILESS:
            return f"{head}\r\n".encode("latin-1")
        return b"%bContent-Length: %d\r\n\r\n%b" % (head.encode("latin-1"), len(body or b""), body or b"")

    def _take(self, loop: asyncio.AbstractEventLoop, url: Url) -> Connection | None:
        idle = self._idle.get(url.place)
        oldest = loop.time() - self._keep_alive
        while idle:
            connection = idle.pop()
            if connection.usable:
                if connection.idle_since >= oldest:
                    return connection
                connection.abort()
        return None

    async def _connect(self, loop: asyncio.AbstractEventLoop, url: Url, seconds: float) -> Connection:
        where = f"host {url.host}:{url.port}" if self._socket_path is None else self._socket_path
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                connection = await self._dial(loop, url, seconds)
        except OSError as error:
            if limit.expired():
                raise TimedOut(seconds) from error
            raise Unreachable(f"Cannot connect to {where}: {_reason(error)}") from error
        if self._closed:
            connection.abort()
            raise Unreachable("the client is closed")
        return connection

    async def _dial(self, loop: asyncio.AbstractEventLoop, url: Url, seconds: float) -> Connection:
        def new() -> Connection:
            return Connection(loop, url.place, self._open, self._release)

        if self._socket_path is not None:
            return (await loop.create_unix_connection(new, self._socket_path))[1]
        tls = None if url.scheme == "http" else self._tls or _system_tls()
        name = None if tls is None else url.host
        *others, last = await self._resolver.addresses(url.host, url.port)
        for address in others:
            # An address that never answers must not use up the time of the next one.
            with suppress(OSError):
                async with asyncio.timeout(seconds / (len(others) + 1)):
                    return (
                        await loop.create_connection(new, address, url.port, ssl=tls, server_hostname=name)
                    )[1]
        return (await loop.create_connection(new, last, url.port, ssl=tls, server_hostname=name))[1]

    def _release(self, connection: Connection) -> None:
        loop = self._loop
        if self._closed or loop is None:
            connection.abort()
            return
        connection.idle_since = loop.time()
        idle = self._idle.get(connection.place)
        if idle is None:
            idle = self._idle[connection.place] = deque()
        idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(self._keep_alive, self._close_old, loop)

    def _close_old(self, loop: asyncio.AbstractEventLoop) -> None:
        oldest = loop.time() - self._keep_alive
        for place, idle in list(self._idle.items()):
            while idle and (idle[0].idle_since <= oldest or not idle[0].usable):
                idle.popleft().abort()
            if not idle:
                del self._idle[place]
        self._sweep = None
        if self._idle:
            first = min(idle[0].idle_since for idle in self._idle.values())
            self._sweep = loop.call_later(first - oldest, self._close_old, loop)


def _reason(error: OSError) -> str:
    """The operating system's message where it has one: it does not depend on the event loop."""
    named = not isinstance(error, ssl.SSLError | socket.gaierror) and error.errno in errno.errorcode
    reason = os.strerror(error.errno) if named and error.errno else error.strerror
    return " ".join((reason or str(error) or type(error).__name__).split())


def _header_lines(headers: Mapping[str, str]) -> str:
    for name, value in headers.items():
        if not _NAME.fullmatch(name) or name.lower() in _TRANSFER_HEADERS:
            raise ConfigError(f"headers: {name!r} cannot be set; accepted: names like X-My-Header")
        if not (value.isascii() and value.isprintable()):
            raise ConfigError(f"headers.{name}: holds a character that no HTTP header can carry")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


@cache
def _system_tls() -> ssl.SSLContext:
    """A context that checks certificates and host names. Cached, because reading the system's certificates is slow."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
