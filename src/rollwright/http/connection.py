"""What a server answered.

One connection to a server, with one request at a time.

What is true: a request ends exactly once, with its answer or with one `HttpFault`; the connection is given back for
the next request only if the answer was whole, both sides keep the connection, and not a byte more has come or is
still to be sent. Whatever else happens, it is closed. Bytes that nobody asked for close it, too.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import httptools

from rollwright.aio import Alarms
from rollwright.http.errors import BrokenAnswer, HttpFault, TimedOut, Unreachable


class Answer(NamedTuple):
    status: int
    reason: str
    """The words beside the status; may be empty."""
    headers: Sequence[tuple[bytes, bytes]]
    """As they came."""
    body: bytes

    def header(self, name: str) -> str | None:
        """The value of the first header with this name, whatever the case of its letters."""
        wanted = name.lower().encode()
        for each, value in self.headers:
            if each.lower() == wanted:
                return value.decode("latin-1").strip()
        return None


MAX_HEAD = 64 * 1024
"""Bytes of an answer before its body, interim answers (1xx) included: twice what usual servers send at most."""

_CONTENT_ENCODING = b"content-encoding"


class Connection(asyncio.Protocol):
    """Its `on_…` methods are what the parser calls while it is fed."""

    __slots__ = (
        "_alarms",
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
        """`place`: where it leads. It is among the `open_ones` as long as it is open, and `released` whenever it can
        take the next request."""
        self.place = place
        self.idle_since = 0.0
        """By the loop's clock, when it was last released."""
        self._loop = loop
        self._max_answer = 0
        self._open_ones = open_ones
        self._released = released
        self._parser: httptools.HttpResponseParser | None = None
        """`None`: not connected yet, or no more."""
        self._waiting: asyncio.Future[Answer] | None = None
        """Whoever asked; `None`: nobody."""
        self._head_only = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._begin()

    @property
    def usable(self) -> bool:
        return self._parser is not None and not self._transport.is_closing()

    def ask(
        self, request: bytes, *, head_only: bool, alarms: Alarms, seconds: float, max_answer: int
    ) -> asyncio.Future[Answer]:
        """Sends a request when no other is under way. `head_only`: its answer has no body, whatever it says. `alarms`:
        what ends it when the `seconds` that it was given are over. `max_answer`: bytes, its head included."""
        self._begin()
        self._max_answer = max_answer
        self._head_only = head_only
        self._alarms, self._seconds = alarms, seconds
        self._waiting = waiting = self._loop.create_future()
        self._transport.write(request)
        alarms.set(self)
        return waiting

    def expire(self) -> None:
        """The time of the request under way is up."""
        self._fail(TimedOut(self._seconds))

    def abort(self) -> None:
        """Closes at once; who still waits for an answer is told."""
        if self._parser is not None:
            self._fail(Unreachable("the connection was closed on this side"))

    def _fail(self, fault: HttpFault) -> None:
        waiting = self._let_go()
        self._transport.abort()
        if waiting is not None and not waiting.done():
            waiting.set_exception(fault)

    def _let_go(self) -> asyncio.Future[Answer] | None:
        """Whoever asked is about to be answered and waits no longer."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._alarms.unset(self)
        return waiting

    def _begin(self) -> None:
        """Nothing of an answer has come yet."""
        self._status = 0
        self._reason = b""
        self._headed = False
        self._received = 0
        self._answer: Answer | None = None
        self._kept = False
        self._refusal: str | None = None

    # -- from the transport ---------------------------------------------------------------------------

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
            self._fail(BrokenAnswer(self._refusal))
        elif self._answer is not None:
            self._hand_over(self._answer)
        elif not self._headed and self._received > MAX_HEAD:
            self._fail(BrokenAnswer(f"the headers are longer than {MAX_HEAD} bytes"))
        elif self._received > self._max_answer:
            self._fail(BrokenAnswer(f"the answer is longer than {self._max_answer} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._parser = None
        self._open_ones.discard(self)
        waiting = self._let_go()
        if waiting is None or waiting.done():
            return
        if not self._headed:
            waiting.set_exception(Unreachable("Server disconnected" if exc is None else str(exc)))
        elif exc is None and self._ends_with_connection():
            waiting.set_result(self._whole())
        else:
            waiting.set_exception(BrokenAnswer("the connection ended in the middle of the answer"))

    # -- from the parser ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._kept = False  # the first message of an answer, an interim one, or one that nobody asked for

    def on_status(self, status: bytes) -> None:
        self._reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._headed:
            return  # after the body, or of what nobody asked for
        self._headers.append((name, value))
        if (
            len(name) == len(_CONTENT_ENCODING)
            and name.lower() == _CONTENT_ENCODING
            and value.strip() != b"identity"
        ):
            self._refusal = f"the body is compressed ({value.decode('latin-1')}), which was not asked for"

    def on_headers_complete(self) -> None:
        if self._headed or self._parser is None:
            return
        self._status = self._parser.get_status_code()
        if self._status >= 200:
            self._headed = True
            if self._head_only:
                self._answer = self._whole()  # the parser may wait for a body: not for another request

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._answer is not None or self._parser is None:
            return
        if self._headed:
            self._answer = self._whole()
            self._kept = self._parser.should_keep_alive()
        else:
            self._headers = []
            self._reason = b""

    # -- the answer -----------------------------------------------------------------------------------

    def _whole(self) -> Answer:
        headers, self._headers = self._headers, []
        parts, self._body = self._body, []
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        return Answer(self._status, self._reason.decode("latin-1"), headers, body)

    def _ends_with_connection(self) -> bool:
        names = {name.lower() for name, _ in self._headers}
        return not names & {b"content-length", b"transfer-encoding"}

    def _hand_over(self, answer: Answer) -> None:
        waiting = self._let_go()
        transport = self._transport
        if waiting is None or waiting.done():  # cancelled: whoever asked takes the connection with it
            transport.abort()
            return
        waiting.set_result(answer)
        if self._kept and not transport.is_closing() and not transport.get_write_buffer_size():
            self._released(self)
        else:
            transport.abort()
