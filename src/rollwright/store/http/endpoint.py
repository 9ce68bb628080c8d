"""One request of the store's server: a call, or a batch of calls, executed on the store.

Plain ASGI, because a web framework's own work for one request would cost several times the store's.
Always true: every error is one line, whatever came in; a request without the token is rejected before its body is read;
no body is held beyond the limits, and a large one is decoded off the event loop; a waiting call ends when its caller
has disconnected.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from rollwright.store.api import Store
from rollwright.store.call_kinds import ClaimCall, OnceCall, StoreCall
from rollwright.store.errors import StoreError, StoreUnavailable
from rollwright.store.http.body import Body, BodyMemory, Gone, Message, Receive
from rollwright.store.http.decoding import SMALL_BODY, BodyDecoder
from rollwright.store.http.errors import INTERNAL, HttpRefusal, error_reply
from rollwright.store.http.idempotency import RecentCalls
from rollwright.store.http.protocol import (
    BATCH,
    FORMATS,
    JSON,
    BatchEntry,
    BatchOutcome,
    Format,
    WithdrawCall,
)

Send = Callable[[Message], Awaitable[None]]
Decoded = TypeVar("Decoded")

_PIECE = 1024 * 1024
"""Bytes of an answer that are handed to a connection in one go: it copies what it cannot send at once."""

MAX_BODY = 64 * 1024 * 1024
"""An episode of a million tokens takes about 12 MiB, 100,000 small rollouts in one call about 20."""

SLICE_SECONDS = 0.005
"""After which a batch yields to other callers' requests."""

PAUSE_SECONDS = 0.001
"""More than 0: uvloop reads few sockets, or none, as long as something is ready to run."""

_log = logging.getLogger(__name__)


class _Head(NamedTuple):
    """The headers that the endpoint reads."""

    format: Format | None
    length: int
    token: bytes | None
    from_a_browser: bool


class CallEndpoint:
    """The ASGI app behind `/v1/{call}`."""

    def __init__(self, store: Store, token: str | None, max_body: int) -> None:
        self._store = store
        self._token = None if token is None else token.encode()
        self._max_body = max_body
        self._memory = BodyMemory()
        self._recent = RecentCalls(store)
        self._decoder = BodyDecoder()
        self._wide = asyncio.Semaphore(1)
        self._waiting: set[asyncio.Task[Any]] = set()
        self._stopping = False

    def stop_waiting(self) -> None:
        """Ends the waiting calls, so that the server can stop; their callers retry."""
        self._stopping = True
        for task in self._waiting:
            task.cancel()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        head = _head(scope["headers"])
        kind = head.format or JSON
        name = scope["path_params"]["call"]
        with Body(receive, self._max_body, self._memory) as body:
            status = 200
            try:
                self._admit(head, body)
                asked = await body.read()
                answer = await self._answer(name, kind, asked, receive)
                if len(asked) <= SMALL_BODY:
                    content = _encode(kind, answer)
                else:  # a large request is likely to have a large reply
                    content = await asyncio.to_thread(_encode, kind, answer)
            except (HttpRefusal, StoreError, StoreUnavailable) as error:
                status, error_body = error_reply(error)
                content = kind.encode(error_body)
            except Gone:
                return
            except Exception:  # noqa: BLE001 - whatever a backend raises, the caller gets one line
                _log.exception("call %s failed", name)
                status, error_body = INTERNAL
                content = kind.encode(error_body)
        await _send(send, status, kind, content, last=body.unread or status == 401)

    # -- taking the request in ------------------------------------------------------------------------

    def _admit(self, head: _Head, body: Body) -> None:
        if self._token is not None:
            if head.token is None or not hmac.compare_digest(head.token, self._token):
                raise HttpRefusal(
                    401, "unauthorized", "the token is missing or wrong: send Authorization: Bearer <token>"
                )
        elif head.from_a_browser:
            # Otherwise any web page open on this machine could call a server without a token.
            raise HttpRefusal(403, "forbidden", "a server without a token takes no calls from web pages")
        if head.format is None:
            raise HttpRefusal(415, "media_type", f"Content-Type is not one of {', '.join(FORMATS)}")
        if head.length > self._max_body:
            raise body.too_large()

    # -- executing the calls --------------------------------------------------------------------------

    async def _answer(self, name: str, kind: Format, body: bytes, receive: Receive) -> Any:
        if name == BATCH:
            entries = await self._decode_large(kind.batch, kind, body)
            if self._store.instant:
                return await self._one_by_one(kind, entries)
            return await asyncio.gather(*[self._outcome(kind, entry) for entry in entries])
        decode = _decoder(kind, name)
        # Small bodies, which most are, are decoded without a further coroutine.
        call = (
            _decode(decode, body) if len(body) <= SMALL_BODY else await self._decode_large(decode, kind, body)
        )
        if call.waits() or call.wide:
            return await self._execute_while_connected(call, receive)
        return await self._execute(call)

    async def _decode_large(self, decode: Callable[[bytes], Decoded], kind: Format, body: bytes) -> Decoded:
        return await self._decoder.decode(partial(_decode, decode), body, kind.count)

    async def _one_by_one(self, kind: Format, entries: Sequence[BatchEntry]) -> list[BatchOutcome]:
        """Yields to other callers' requests when it takes long."""
        outcomes = []
        began = time.perf_counter()
        for entry in entries:
            outcomes.append(await self._outcome(kind, entry))
            if time.perf_counter() - began > SLICE_SECONDS:
                await asyncio.sleep(PAUSE_SECONDS)
                began = time.perf_counter()
        return outcomes

    async def _outcome(self, kind: Format, entry: BatchEntry) -> BatchOutcome:
        try:
            arguments = bytes(entry.arguments)
            decode = _decoder(kind, entry.call)
            call = (
                _decode(decode, arguments)
                if len(arguments) <= SMALL_BODY
                else await self._decode_large(decode, kind, arguments)
            )
            if call.waits():
                raise HttpRefusal(400, "refused", f"{entry.call} waits: it cannot be part of a batch")
            return BatchOutcome(answer=await (self._execute_wide(call) if call.wide else self._execute(call)))
        except (HttpRefusal, StoreError, StoreUnavailable) as error:
            return BatchOutcome(refusal=error_reply(error).body)
        except Exception:  # noqa: BLE001 - one call's failure must not take the others' answers with it
            _log.exception("call %s failed", entry.call)
            return BatchOutcome(refusal=INTERNAL.body)

    async def _execute_wide(self, call: StoreCall[Any]) -> Any:
        async with self._wide:
            answer = await self._execute(call)
            if self._store.instant:
                await asyncio.sleep(PAUSE_SECONDS)  # else several of them would run without a pause
            return answer

    async def _execute(self, call: StoreCall[Any]) -> Any:
        if isinstance(call, ClaimCall):
            return await self._recent.claim(call)
        if isinstance(call, OnceCall):
            return await self._recent.execute_once(call)
        if isinstance(call, WithdrawCall):
            return await self._recent.withdraw(call.call_id)
        return await call.bounded(self._store.execute)

    async def _execute_while_connected(self, call: StoreCall[Any], receive: Receive) -> Any:
        if self._stopping and call.waits():
            raise StoreUnavailable("the server is stopping")
        executing = asyncio.create_task(self._execute_wide(call) if call.wide else self._execute(call))
        gone = asyncio.ensure_future(receive())
        if call.waits():
            self._waiting.add(executing)
        try:
            await asyncio.wait({executing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not executing.done():
                raise Gone
            if executing.cancelled():
                raise StoreUnavailable("the server is stopping")
            return executing.result()
        finally:
            self._waiting.discard(executing)
            executing.cancel()
            gone.cancel()


def _head(headers: list[tuple[bytes, bytes]]) -> _Head:
    kind, length, token, from_a_browser = None, 0, None, False
    for name, value in headers:
        if name == b"content-type":
            kind = FORMATS.get(value.split(b";")[0].strip().lower().decode("latin-1"))
        elif name == b"content-length":
            length = int(value)
        elif name == b"authorization":
            scheme, _, given = value.partition(b" ")
            token = given.strip() if scheme.lower() == b"bearer" else None
        elif name == b"origin":
            from_a_browser = True
    return _Head(kind, length, token, from_a_browser)


def _decoder(kind: Format, name: str) -> Callable[[bytes], StoreCall[Any]]:
    decode = kind.calls.get(name)
    if decode is None:
        raise HttpRefusal(404, "no_such_call", f"no call {name[:80]!r}; accepted: {', '.join(kind.calls)}")
    return decode


def _decode(decode: Callable[[bytes], Decoded], body: bytes) -> Decoded:
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        raise HttpRefusal(422, "invalid", str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpRefusal(400, "malformed", f"the body cannot be read: {error}") from None


def _encode(kind: Format, answer: Any) -> bytes:
    try:
        return kind.encode(answer)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        # Data that came in as msgpack can hold what JSON cannot.
        raise HttpRefusal(
            406, "not_acceptable", f"{kind.media_type} cannot carry the answer: {error}"
        ) from None


async def _send(send: Send, status: int, kind: Format, content: bytes, *, last: bool) -> None:
    """`last`: the connection is closed after this reply."""
    headers = [
        (b"content-type", kind.media_type.encode()),
        (b"content-length", str(len(content)).encode()),
    ]
    if last:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if len(content) > _PIECE:  # others are let in whenever the connection can take no more
        view = memoryview(content)
        for start in range(0, len(content), _PIECE):
            piece = view[start : start + _PIECE]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        content = b""
    await send({"type": "http.response.body", "body": content})
