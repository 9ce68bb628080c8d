"""One client connection to a server, with one request at a time; its responses and its faults.

Always true: a request ends exactly once, with its response or with one `HttpFault`. The connection is released for the
next request only if the response was whole, both sides keep the connection alive, no further byte has arrived and none is
left to send. In every other case it is closed; unsolicited bytes close it, too.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import httptools

from rollwright.aio import TimeoutQueue
from rollwright.errors import RollwrightError


class HttpFault(RollwrightError):
    """A request ended without a whole response. The message is one line."""


class Unreachable(HttpFault):
    """There is no connection, or it ended before the response began."""


class TimedOut(HttpFault):
    """The response did not arrive in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:g} s")
        self.seconds = seconds
        """The limit that was reached: the request's, or that of connecting."""


class BrokenResponse(HttpFault):
    """The bytes received are not HTTP, exceed the size limit, or ended in the middle of the response."""


class HttpResponse(NamedTuple):
    """A whole response."""

    status: int
    reason: str
    """The reason phrase; may be empty."""
    headers: Sequence[tuple[bytes, bytes]]
    """In the order and the case of letters in which they arrived."""
    body: bytes

    def header(self, name: str) -> str | None:
        """The value of the first header with this name, whatever the case of its letters."""
        wanted = name.lower().encode()
        for each, value in self.headers:
            if each.lower() == wanted:
                return value.decode("latin-1").strip()
        return None


MAX_HEAD = 64 * 1024
"""Bytes before the body of a response, interim responses (1xx) included: twice the limit of common servers."""

_CONTENT_ENCODING = b"content-encoding"


class Connection(asyncio.Protocol):
    """The asyncio protocol of one connection; the parser calls its `on_…` methods."""

    __slots__ = (
        "_answer",
        "_body",
        "_head_only",
        "_headed",
        "_headers",
        "_kept",
        "_loop",
        "_max_answer",
        "_open_ones",
        "_parser",
        "_reason",
        "_received",
        "_refusal",
        "_released",
        "_seconds",
        "_status",
        "_timeouts",
        "_transport",
        "_waiting",
        "idle_since",
        "place",
    )

    _transport: asyncio.Transport

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        place: tuple[str, str],
        open_ones: set["Connection"],
        released: Callable[["Connection"], None],
    ) -> None:
        """`place`: scheme and authority of the server. `open_ones`: the client's set of open connections, in which this one
        keeps itself. `released`: called whenever the connection can take the next request."""
        self.place = place
        self.idle_since = 0.0
        """Time of the last release, by the loop's clock."""
        self._loop = loop
        self._max_answer = 0
        self._open_ones = open_ones
        self._released = released
        self._parser: httptools.HttpResponseParser | None = None
        """`None`: not connected yet, or closed."""
        self._waiting: asyncio.Future[HttpResponse] | None = None
        """The pending request; `None`: no request is under way."""
        self._head_only = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._reset()

    @property
    def usable(self) -> bool:
        return self._parser is not None and not self._transport.is_closing()

    def ask(
        self, request: bytes, *, head_only: bool, timeouts: TimeoutQueue, seconds: float, max_answer: int
    ) -> asyncio.Future[HttpResponse]:
        """Send a request; no other may be under way. `head_only`: the response has no body, whatever its headers say.
        `timeouts`: the queue that ends the request after `seconds`. `max_answer`: bytes of the response with its head."""
        self._reset()
        self._max_answer = max_answer
        self._head_only = head_only
        self._timeouts, self._seconds = timeouts, seconds
        self._waiting = waiting = self._loop.create_future()
        self._transport.write(request)
        timeouts.start(self)
        return waiting

    def expire(self) -> None:
        """End the request under way, whose time is up."""
        self._fail(TimedOut(self._seconds))

    def abort(self) -> None:
        """Close at once; a request under way ends as `Unreachable`."""
        if self._parser is not None:
            self._fail(Unreachable("the connection was closed on this side"))

    def _fail(self, fault: HttpFault) -> None:
        waiting = self._take_pending()
        self._transport.abort()
        if waiting is not None and not waiting.done():
            waiting.set_exception(fault)

    def _take_pending(self) -> asyncio.Future[HttpResponse] | None:
        """Take the pending request out of the connection and cancel its timeout."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._timeouts.cancel(self)
        return waiting

    def _reset(self) -> None:
        """Reset the state of the response."""
        self._status = 0
        self._reason = b""
        self._headed = False
        self._received = 0
        self._answer: HttpResponse | None = None
        self._kept = False
        self._refusal: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass of it
        self._parser = httptools.HttpResponseParser(self)
        self._open_ones.add(self)

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if self._waiting is None or parser is None:
            self._transport.abort()
            return
        self._received += len(data)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._kept = False
            if self._answer is None and self._refusal is None:
                self._refusal = f"not an HTTP/1.1 answer: {error}"
        if self._refusal is not None:
            self._fail(BrokenResponse(self._refusal))
        elif self._answer is not None:
            self._deliver(self._answer)
        elif not self._headed and self._received > MAX_HEAD:
            self._fail(BrokenResponse(f"the headers are longer than {MAX_HEAD} bytes"))
        elif self._received > self._max_answer:
            self._fail(BrokenResponse(f"the answer is longer than {self._max_answer} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._parser = None
        self._open_ones.discard(self)
        waiting = self._take_pending()
        if waiting is None or waiting.done():
            return
        if not self._headed:
            waiting.set_exception(Unreachable("Server disconnected" if exc is None else str(exc)))
        elif exc is None and self._ends_with_connection():
            waiting.set_result(self._build_response())
        else:
            waiting.set_exception(BrokenResponse("the connection ended in the middle of the answer"))

    def on_message_begin(self) -> None:
        self._kept = False  # an interim or unsolicited message may follow the first one

    def on_status(self, status: bytes) -> None:
        self._reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._headed:
            return  # a trailer, or a header of an unsolicited message
        self._headers.append((name, value))
        if (
            len(name) == len(_CONTENT_ENCODING)
            and name.lower() == _CONTENT_ENCODING
            and value.strip() != b"identity"
        ):
            self._refusal = (
                f"the body is compressed ({value.decode('latin-1')}), which the request did not allow"
            )

    def on_headers_complete(self) -> None:
        if self._headed or self._parser is None:
            return
        self._status = self._parser.get_status_code()
        if self._status >= 200:
            self._headed = True
            if self._head_only:
                # The parser may go on waiting for a body, so the connection takes no other request.
                self._answer = self._build_response()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._answer is not None or self._parser is None:
            return
        if self._headed:
            self._answer = self._build_response()
            self._kept = self._parser.should_keep_alive()
        else:
            self._headers = []
            self._reason = b""

    def _build_response(self) -> HttpResponse:
        headers, self._headers = self._headers, []
        parts, self._body = self._body, []
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        return HttpResponse(self._status, self._reason.decode("latin-1"), headers, body)

    def _ends_with_connection(self) -> bool:
        names = {name.lower() for name, _ in self._headers}
        return not names & {b"content-length", b"transfer-encoding"}

    def _deliver(self, answer: HttpResponse) -> None:
        waiting = self._take_pending()
        transport = self._transport
        if waiting is None or waiting.done():  # a cancelled request takes its connection with it
            transport.abort()
            return
        waiting.set_result(answer)
        if self._kept and not transport.is_closing() and not transport.get_write_buffer_size():
            self._released(self)
        else:
            transport.abort()
