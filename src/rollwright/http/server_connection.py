"""Server connections within limits of time, size and number.

Always true: whatever a client sends or does not send, its connection makes progress or ends within the time limits. A
request that is refused before its body is read is drained for a moment only, so that the client gets the response. A
connection that waits for its client gives up its place when a new connection needs it.

uvicorn parses the requests and runs the ASGI application. A sweep once a second checks every connection, so a request costs
a few assignments and no timer.
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
"""Upper bound where file handles allow more: a connection takes about 10 KB, and a sweep checks all of them."""

FEWEST_CONNECTIONS = 8
"""Lower bound where hardly any file handles are left."""

_WANTED_HANDLES = 65_536
"""More than the connections of any cluster; far fewer than the millions that some systems allow, which programs that
iterate over all handles suffer from."""


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of one server. The defaults admit every honest client and give attackers little to hold."""

    connections: int | None = None
    """Most at a time. Above it, connections that hold a place without using it are closed, the oldest first; if all are in
    use, a new one is refused. `None`: half of the process's file handles, because stores, engines and sandboxes of the
    same process need the others."""
    head_seconds: float = 10.0
    """From the start of the connection or the first byte of a request to the end of its headers: clients send them in one
    piece."""
    head_bytes: int = 64 * 1024
    """Request line and headers together; with keys, ids and headers of SDKs they take about 2 KiB."""
    headers: int = 128
    """In one request; SDKs send about 20."""
    pipelined: int = 16
    """Requests sent before the response to the previous one; common clients never do this."""
    body_seconds: float = 10.0
    """For a body, in addition to its time at `bytes_per_second`."""
    answer_seconds: float = 20.0
    """For a client to read a response, in addition to its time at `bytes_per_second`."""
    bytes_per_second: int = 16 * 1024
    """A client that is slower on average holds a place on purpose, or its network is broken."""
    unread_bytes: int = 256 * 1024 * 1024
    """Total of responses that their clients have not read; above it the slowest connections are closed."""
    idle_seconds: int = 75
    """Between two requests of a connection. Longer than clients keep an idle connection, so that they never send a request
    into one that is being closed."""
    sweep_seconds: float = 1.0
    """Between two sweeps: the precision of the limits above."""
    linger_seconds: float = 2.0
    """A connection whose request was refused before it was read whole is drained for so long: if it were closed at once, the
    client would get a connection reset instead of the response."""
    linger_bytes: int = 4 * 1024 * 1024
    """Most bytes drained."""

    @property
    def most_connections(self) -> int:
        if self.connections is not None:
            return self.connections
        handles, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if handles == resource.RLIM_INFINITY:
            return MAX_CONNECTIONS
        return max(FEWEST_CONNECTIONS, min(MAX_CONNECTIONS, handles // 2))


def raise_handle_limit() -> None:
    """Raise the soft limit of file handles as far as the hard limit allows: the usual 1,024 are a default for programs that
    use `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_HANDLES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_HANDLES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_LOG_SECONDS = 10.0
"""Between two log lines about closed connections: an attack must not fill the disk."""

_log = logging.getLogger(__name__)


class Stage(Enum):
    """What a connection waits for; the value is the reason in the log when it is closed there."""

    HEAD = "sent no request"
    """The headers of a request."""
    BODY = "sent its request too slowly"
    """The body of a request whose headers are complete."""
    WORK = "did not take its answer"
    """The response to a complete request."""
    IDLE = "idle"
    """The next request."""
    LINGER = "refused"
    """The client, to read a refusal."""


_EXPENDABLE = (Stage.LINGER, Stage.HEAD, Stage.IDLE)
"""Stages that give up their place for a new connection, in this order: refused ones, then ones that have sent nothing, then
idle clients, which can connect again."""

_CHUNK_OVERHEAD = 8
"""Most bytes received for each byte of a chunked body: chunks of one byte take six, and longer chunk headers are rare."""

_CONTINUE = b"HTTP/1.1 100 "
"""Start of the interim response that asks the client for its body."""

_FULL = "no place left"
_UNREAD = "too many unread answers"


def _refusal(status: str, words: str) -> bytes:
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: {len(words)}\r\n"
        f"connection: close\r\n\r\n{words}"
    ).encode()


_BUSY = _refusal("503 Service Unavailable", "all connections are in use")
_LONG_HEAD = _refusal("431 Request Header Fields Too Large", "the headers are too long")


class LimitExceeded(Exception):
    """Raised while parsing a request that exceeds a limit; uvicorn responds with 400."""


class Connections:
    """All connections of one server."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.most = limits.most_connections
        self.closed: Counter[str] = Counter()
        """Counts connections that the server ended, by reason."""
        self._stages: dict[Stage, OrderedDict[GuardedConnection, None]] = {
            stage: OrderedDict() for stage in Stage
        }
        """Connections by stage, in the order in which they entered it."""
        self._count = 0
        self._swept: float | None = None
        self._logged: tuple[float, int] = (0.0, 0)
        """Time of the last log line, and the count in it."""

    def __len__(self) -> int:
        return self._count

    def admit(self, new: "GuardedConnection") -> bool:
        """Admit a new connection; if the server is full, close an expendable one for it. False: there is none."""
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
        """Move a connection to a stage; does nothing for one that was ended, whose request may still run."""
        if connection in self._stages[connection.placed]:
            del self._stages[connection.placed][connection]
            self._stages[stage][connection] = None
            connection.placed = stage

    def remove(self, connection: "GuardedConnection") -> None:
        """Remove a connection; does nothing for one that was not admitted."""
        if connection in self._stages[connection.placed]:
            del self._stages[connection.placed][connection]
            self._count -= 1

    def end(self, connection: "GuardedConnection", why: str) -> None:
        self.closed[why] += 1
        self.remove(connection)
        connection.abort()

    def sweep(self, now: float) -> None:
        """Close connections that are overdue. Time during which this process did not sweep is not held against them."""
        late = 0.0 if self._swept is None else max(0.0, now - self._swept - 2 * self.limits.sweep_seconds)
        self._swept = now
        unread: list[tuple[float, GuardedConnection]] = []
        for connection in [each for stage in self._stages.values() for each in stage]:
            if late:
                connection.extend_time(late)
            why = connection.overdue(now, self.limits)
            if why is not None:
                self.end(connection, why)
            elif connection.stuck_since is not None:
                unread.append((connection.stuck_since, connection))
        self._drop_unread(unread)
        self._log_closed(now)

    def _drop_unread(self, unread: "list[tuple[float, GuardedConnection]]") -> None:
        total = sum(connection.unread for _, connection in unread)
        for _, connection in sorted(unread, key=lambda each: each[0]):
            if total <= self.limits.unread_bytes:
                return
            total -= connection.unread
            self.end(connection, _UNREAD)

    def _log_closed(self, now: float) -> None:
        logged_at, logged = self._logged
        total = self.closed.total() - self.closed[Stage.LINGER.value]  # refused clients got a response
        if total > logged and now - logged_at >= _LOG_SECONDS:
            self._logged = (now, total)
            reasons = ", ".join(f"{count} {why}" for why, count in self.closed.most_common())
            _log.warning("closed connections so far: %s; %d are open", reasons, self._count)


class _Transport:
    """The transport that uvicorn sees: counts written bytes, and closes without cutting off a response.

    The head of a response is held back and sent together with the body, which saves a system call for each response.
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
        """Whether the next write is the head of a response."""
        self._head = b""
        """The head of a response whose body was not written yet."""
        self.lingers = False
        """Whether the connection is being drained; it is closed for uvicorn."""
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
        """Send a head that no body follows."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._close()

    def is_closing(self) -> bool:
        return self.lingers or self.plain.is_closing()


class GuardedConnection(HttpToolsProtocol):
    """uvicorn's connection, with the stage that it is in and the time when it entered it."""

    _transport: _Transport

    def __init__(self, table: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._table = table
        self.stage = Stage.HEAD
        self.placed = Stage.HEAD
        """The stage under which the table lists it; lags behind `stage` while a piece of data is being parsed."""
        self.since = self._now = self.loop.time()
        self._received = 0
        """Bytes received in this stage."""
        self._delivered = 0
        """Bytes of them that belong to a body."""
        self.stuck_since: float | None = None
        """Time since which a response has been unread; set by the sweep."""
        self._taken = 0
        """Bytes that the client had read by then."""

    @property
    def unread(self) -> int:
        return int(self._transport.get_write_buffer_size())

    def extend_time(self, seconds: float) -> None:
        """Give the connection more time in its stage."""
        self.since += seconds
        if self.stuck_since is not None:
            self.stuck_since += seconds

    def overdue(self, now: float, limits: ServerLimits) -> str | None:
        """Why the connection must end now; `None`: it may stay."""
        if self._is_stuck(now, limits):
            return Stage.WORK.value
        waited = now - self.since
        if self.stage is Stage.BODY and self.flow.read_paused:
            # The server has paused reading, so the time is not the client's.
            self.since, self._received, self._delivered = now, 0, 0
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
        self._free_body()

    def _free_body(self) -> None:
        """Free the body of a finished request at once: uvicorn's objects form reference cycles, and servers let the garbage
        collector run rarely."""
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
        """Bound the bytes that are not body: headers, and in a chunked body the chunk headers and trailers."""
        other = self._received - _CHUNK_OVERHEAD * self._delivered
        if other > self._table.limits.head_bytes or len(self.headers or ()) > self._table.limits.headers:
            self._transport.write(_LONG_HEAD)
            self._transport.close()

    def on_message_begin(self) -> None:
        self._enter(Stage.HEAD)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        limits = self._table.limits
        if len(self.pipeline) >= limits.pipelined or len(self.headers) > limits.headers:
            raise LimitExceeded
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
            self._close()  # the response came before the body was read; the rest of the body is of no use
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
        """Close the connection; one whose client is still sending is drained for a moment first."""
        plain = self._transport.plain
        if self._transport.lingers or plain.is_closing():
            return
        if self.stage in (Stage.HEAD, Stage.BODY) and plain.can_write_eof():
            self._now = self.loop.time()
            self._enter(Stage.LINGER)
            self._settle()
            self._free_body()
            self.flow.resume_reading()
            plain.write_eof()
            self._transport.lingers = True
        else:
            plain.close()
