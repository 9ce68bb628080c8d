"""How much time, memory and how many file handles connections may take, and how that follows from the machine.

One client's connection to a server, within limits of time, size and number.

Always true: whatever a client sends, or does not send, its connection ends within the time limits or is making
progress; a request that was answered before its body was read is never read further than a little, for the client to
get the answer; a connection that waits for its client costs a place only as long as nobody else needs it.

The parsing, and the ASGI side, are uvicorn's. A sweep once a second looks at every connection, so that a request itself
costs a few assignments and no timer.
"""

import asyncio
import logging
import resource
from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_CONNECTIONS = 10_000
"""Where the file handles would allow more: each connection takes about 10 KB, and a sweep looks at all of them."""

FEWEST_CONNECTIONS = 8
"""Where hardly any file handles are left, a server still serves one after the other."""

_WANTED_HANDLES = 65_536
"""More than the connections of any cluster; far from the millions that some systems allow and some programs walk."""


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of one server. The defaults let every honest client through and leave strangers little to hold."""

    connections: int | None = None
    """Most at a time. Above it, those that hold a place without using it are closed first, the oldest first; if all
    are in use, a new one is refused. `None`: half of the file handles that the process may have, because stores,
    engines and sandboxes of the same process need the others."""
    head_seconds: float = 10.0
    """From the first byte of a request, or from the connection's start, to the end of its headers: clients send them
    in one piece."""
    head_bytes: int = 64 * 1024
    """Request line and headers together; keys, ids and what SDKs add take about 2 KiB."""
    headers: int = 128
    """In one request; SDKs send about 20."""
    pipelined: int = 16
    """Requests sent ahead of their answers; usual clients never do."""
    body_seconds: float = 10.0
    """For a body, on top of what it takes at `bytes_per_second`."""
    answer_seconds: float = 20.0
    """For a client to take an answer, on top of what it takes at `bytes_per_second`."""
    bytes_per_second: int = 16 * 1024
    """A client slower than this in the mean holds a place on purpose, or its line is broken."""
    unread_bytes: int = 256 * 1024 * 1024
    """Answers that their clients have not taken yet, all together; above it the slowest are closed."""
    idle_seconds: int = 75
    """Between two requests of a connection. Longer than clients keep an idle one, so that they never send into one that
    is being closed."""
    sweep_seconds: float = 1.0
    """Between two looks at all connections: the limits above are that exact."""
    linger_seconds: float = 2.0
    """A connection whose request was refused before it was read whole is still read for so long, and thrown away: if it
    were closed at once, the system would tell the client of a broken connection instead of the reason."""
    linger_bytes: int = 4 * 1024 * 1024
    """At most so much of it."""

    @property
    def most_connections(self) -> int:
        if self.connections is not None:
            return self.connections
        handles, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if handles == resource.RLIM_INFINITY:
            return MAX_CONNECTIONS
        return max(FEWEST_CONNECTIONS, min(MAX_CONNECTIONS, handles // 2))


def raise_handle_limit() -> None:
    """Lets this process have the file handles that it may have without asking anybody: the usual 1,024 are a default
    for programs that cannot count further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_HANDLES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_HANDLES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_TELL_SECONDS = 10.0
"""Between two lines of the log about connections that were closed: an attack must not fill the disk."""

_log = logging.getLogger(__name__)


class Stage(Enum):
    """What a connection waits for."""

    HEAD = "sent no request"
    """For the headers of a request, the first or the next."""
    BODY = "sent its request too slowly"
    """For the rest of a request whose headers are there."""
    WORK = "did not take its answer"
    """For its answer: the request is there."""
    IDLE = "idle"
    """For the next request."""
    LINGER = "refused"
    """For the client to take note of a refusal."""


_EXPENDABLE = (Stage.LINGER, Stage.HEAD, Stage.IDLE)
"""Who gives up its place for a new connection, in this order: those that will never be served, then those that have
shown nothing, then clients that can connect again when they need it."""

_CHUNK_MARKS = 8
"""Bytes on the way for each byte of a body, at most: chunks of one byte take six, and longer marks for them are rare."""

_CONTINUE = b"HTTP/1.1 100 "
"""Leave to send a body, ahead of the answer."""

_FULL = "no place left"
_UNREAD = "too many unread answers"


def _refusal(status: str, words: str) -> bytes:
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: {len(words)}\r\n"
        f"connection: close\r\n\r\n{words}"
    ).encode()


_BUSY = _refusal("503 Service Unavailable", "all connections are in use")
_LONG_HEAD = _refusal("431 Request Header Fields Too Large", "the headers are too long")


class TooMuch(Exception):
    """Ends the parsing of what a client sent; uvicorn answers with 400."""


class Connections:
    """All connections of one server."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.most = limits.most_connections
        self.closed: Counter[str] = Counter()
        """Connections that the server ended, by reason."""
        self._stages: dict[Stage, OrderedDict[GuardedConnection, None]] = {
            stage: OrderedDict() for stage in Stage
        }
        """In the order in which they came to where they are."""
        self._count = 0
        self._swept: float | None = None
        self._told: tuple[float, int] = (0.0, 0)

    def __len__(self) -> int:
        return self._count

    def admit(self, new: "GuardedConnection") -> bool:
        """Takes a new connection in, at the cost of one that is of less use if there is no place left."""
        if self._count >= self.most and not self._make_room():
            self.closed[_FULL] += 1
            return False
        self._count += 1
        self._stages[new.placed][new] = None
        return True

    def _make_room(self) -> bool:
        for stage in _EXPENDABLE:
            if self._stages[stage]:
                self.end(next(iter(self._stages[stage])), _FULL)
                return True
        return False

    def move(self, connection: "GuardedConnection", stage: Stage) -> None:
        """Does nothing for one that was ended: its request may still be at work."""
        if connection in self._stages[connection.placed]:
            del self._stages[connection.placed][connection]
            self._stages[stage][connection] = None
            connection.placed = stage

    def remove(self, connection: "GuardedConnection") -> None:
        """Does nothing for one that was not taken in."""
        if connection in self._stages[connection.placed]:
            del self._stages[connection.placed][connection]
            self._count -= 1

    def end(self, connection: "GuardedConnection", why: str) -> None:
        self.closed[why] += 1
        self.remove(connection)
        connection.abort()

    def sweep(self, now: float) -> None:
        """Closes what is over its time. The time in which this process did not come to look is nobody's fault."""
        late = 0.0 if self._swept is None else max(0.0, now - self._swept - 2 * self.limits.sweep_seconds)
        self._swept = now
        unread: list[tuple[float, GuardedConnection]] = []
        for connection in [each for stage in self._stages.values() for each in stage]:
            if late:
                connection.allow(late)
            why = connection.overdue(now, self.limits)
            if why is not None:
                self.end(connection, why)
            elif connection.stuck_since is not None:
                unread.append((connection.stuck_since, connection))
        self._drop_unread(unread)
        self._tell(now)

    def _drop_unread(self, unread: "list[tuple[float, GuardedConnection]]") -> None:
        total = sum(connection.unread for _, connection in unread)
        for _, connection in sorted(unread, key=lambda each: each[0]):
            if total <= self.limits.unread_bytes:
                return
            total -= connection.unread
            self.end(connection, _UNREAD)

    def _tell(self, now: float) -> None:
        told_at, told = self._told
        total = self.closed.total() - self.closed[Stage.LINGER.value]  # those were told why
        if total > told and now - told_at >= _TELL_SECONDS:
            self._told = (now, total)
            reasons = ", ".join(f"{count} {why}" for why, count in self.closed.most_common())
            _log.warning("closed connections so far: %s; %d are open", reasons, self._count)


class _Transport:
    """The connection's transport as uvicorn sees it: counts what is written, and closes without cutting off an answer.

    An answer's head goes out together with what follows it, which saves a system call for each answer.
    """

    __slots__ = (
        "_close",
        "_head",
        "_write",
        "abort",
        "get_extra_info",
        "get_write_buffer_size",
        "head_is_next",
        "lingers",
        "pause_reading",
        "plain",
        "resume_reading",
        "written",
    )

    def __init__(self, transport: asyncio.Transport, close: Any) -> None:
        self.plain = transport
        self._write = transport.write
        self._close = close
        self.written = 0
        self.head_is_next = False
        """Whether an answer begins with the next write."""
        self._head = b""
        """The head of an answer whose body is not there yet."""
        self.lingers = False
        """For uvicorn it is closed then."""
        self.abort = transport.abort
        self.get_extra_info = transport.get_extra_info
        self.get_write_buffer_size = transport.get_write_buffer_size
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def write(self, data: bytes) -> None:
        if self.lingers:
            return
        if self.head_is_next and not data.startswith(_CONTINUE):
            self.head_is_next = False
            self._head = data
            return
        if self._head:
            data, self._head = self._head + data, b""
        self.written += len(data)
        self._write(data)

    def flush(self) -> None:
        """Sends a head that nothing follows."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._close()

    def is_closing(self) -> bool:
        return self.lingers or self.plain.is_closing()


class GuardedConnection(HttpToolsProtocol):
    """uvicorn's connection, with a stage that says what it waits for and since when."""

    _transport: _Transport

    def __init__(self, table: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._table = table
        self.stage = Stage.HEAD
        self.placed = Stage.HEAD
        """Where the table has it: as long as one piece of data is being parsed, behind the stage itself."""
        self.since = self._now = self.loop.time()
        self._received = 0
        """Bytes that came in this stage."""
        self._delivered = 0
        """Of them, those of a body."""
        self.stuck_since: float | None = None
        """Since when there has been something for the client to take; looked at by the sweep."""
        self._taken = 0
        """How much it had taken by then."""

    # -- what the table asks ----------------------------------------------------------------------------

    @property
    def unread(self) -> int:
        return int(self._transport.get_write_buffer_size())

    def allow(self, seconds: float) -> None:
        self.since += seconds
        if self.stuck_since is not None:
            self.stuck_since += seconds

    def overdue(self, now: float, limits: ServerLimits) -> str | None:
        """Why it must end now; `None`: it may go on."""
        if self._is_stuck(now, limits):
            return Stage.WORK.value
        waited = now - self.since
        if self.stage is Stage.BODY and self.flow.read_paused:
            self.since, self._received, self._delivered = (
                now,
                0,
                0,
            )  # the server does not read on: no fault of the client's
        elif self.stage is Stage.BODY:
            over = waited > limits.body_seconds + self._received / limits.bytes_per_second
            return str(self.stage.value) if over else None
        elif (self.stage is Stage.HEAD and waited > limits.head_seconds) or (
            self.stage is Stage.LINGER and waited > limits.linger_seconds
        ):
            return str(self.stage.value)
        return None

    def _is_stuck(self, now: float, limits: ServerLimits) -> bool:
        unread = self.unread
        if not unread:
            self.stuck_since = None
            return False
        taken = self._transport.written - unread
        if self.stuck_since is None:
            self.stuck_since, self._taken = now, taken
        allowed = limits.answer_seconds + (taken - self._taken) / limits.bytes_per_second
        return now - self.stuck_since > allowed

    def abort(self) -> None:
        self._transport.abort()

    # -- stages -----------------------------------------------------------------------------------------

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self.since = self._now
        self._received = self._delivered = 0

    def _settle(self) -> None:
        if self.placed is not self.stage:
            self._table.move(self, self.stage)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = _Transport(transport, self._close)
        super().connection_made(self._transport)  # type: ignore[arg-type]
        if not self._table.admit(self):
            transport.write(_BUSY)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        super().connection_lost(exc)
        self._let_go_of_body()

    def _let_go_of_body(self) -> None:
        """At once: connections and what uvicorn makes for them refer to each other, so they go when the collector looks,
        and servers have it look rarely."""
        if self.cycle is not None and (self.cycle.response_complete or self.cycle.disconnected):
            self.cycle.body = bytearray()

    def data_received(self, data: bytes) -> None:
        if self.stage is Stage.LINGER:
            self._received += len(data)
            if self._received > self._table.limits.linger_bytes:
                self._table.end(self, self.stage.value)
            return
        if self._transport.plain.is_closing():
            return
        self._now = self.loop.time()
        if self.stage is Stage.IDLE:
            self._enter(Stage.HEAD)
        super().data_received(data)
        self._received += len(data)
        self._settle()
        if self.stage is Stage.HEAD or self.stage is Stage.BODY:
            self._check_length()

    def _check_length(self) -> None:
        """What is no body (headers, and in a body that comes in chunks their marks and what follows them) is bounded."""
        other = self._received - _CHUNK_MARKS * self._delivered
        if other > self._table.limits.head_bytes or len(self.headers or ()) > self._table.limits.headers:
            self._transport.write(_LONG_HEAD)
            self._transport.close()

    def on_message_begin(self) -> None:
        self._enter(Stage.HEAD)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        limits = self._table.limits
        if len(self.pipeline) >= limits.pipelined or len(self.headers) > limits.headers:
            raise TooMuch
        self._enter(Stage.BODY)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._delivered += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.cycle.response_complete:
            self._enter(Stage.IDLE)
        else:
            self._enter(Stage.WORK)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._transport.head_is_next = True
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._transport.flush()
        self._now = self.loop.time()
        if self.stage is Stage.BODY and self.cycle.response_complete:
            self._close()  # it was refused before it was read; what follows is of no use
        elif self.stage is Stage.WORK and not self.pipeline:
            self._enter(Stage.IDLE)
            self._settle()
        super().on_response_complete()

    def shutdown(self) -> None:
        if self.stage is Stage.LINGER:
            self.abort()
        elif self.cycle is None or self.cycle.response_complete:
            self._transport.plain.close()
        else:
            super().shutdown()

    def _close(self) -> None:
        """A client that is still sending is heard out for a moment."""
        plain = self._transport.plain
        if self._transport.lingers or plain.is_closing():
            return
        if self.stage in (Stage.HEAD, Stage.BODY) and plain.can_write_eof():
            self._now = self.loop.time()
            self._enter(Stage.LINGER)
            self._settle()
            self._let_go_of_body()
            self.flow.resume_reading()
            plain.write_eof()
            self._transport.lingers = True
        else:
            plain.close()
