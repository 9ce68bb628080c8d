"""Server connections within limits of time, size and number.

Always true: whatever a client sends or does not send, its connection makes progress or ends within the time limits. A
request that is refused before its body is read is drained for a moment only, so that the client gets the response. A
connection that waits for its client gives up its place when a new connection needs it.

uvicorn parses the requests and runs the ASGI application. A sweep once a second checks every connection, so a request costs
a few assignments and no timer.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollwright.http.server_limits import Connections, ServerLimits, Stage

_CHUNK_OVERHEAD = 8
"""Most bytes received for each byte of a chunked body: chunks of one byte take six, and longer chunk headers are rare."""

_CONTINUE = b"HTTP/1.1 100 "
"""Start of the interim response that asks the client for its body."""


def _refusal(status: str, words: str) -> bytes:
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: {len(words)}\r\n"
        f"connection: close\r\n\r\n{words}"
    ).encode()


_BUSY = _refusal("503 Service Unavailable", "all connections are in use")
_LONG_HEAD = _refusal("431 Request Header Fields Too Large", "the headers are too long")


class LimitExceeded(Exception):
    """Raised while parsing a request that exceeds a limit; uvicorn responds with 400."""


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
