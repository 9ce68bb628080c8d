"""HTTP endpoint of the gateway: authentication, request limits, dispatch to an API format, responses and streams.

Plain ASGI, because the overhead of a web framework for one request would exceed all other work. Always true: every error is
one line in the format of the client's SDK; a request without a valid key is rejected before its body is read; no body
exceeds the limits, and a large one is parsed outside of the event loop; a client that disconnects loses only its response,
and receives it when it repeats the request.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote

import msgspec

from rollwright.errors import FormatError
from rollwright.gateway.anthropic_messages import AnthropicMessages
from rollwright.gateway.chat_completions import ChatCompletions
from rollwright.gateway.gemini import (
    COUNT,
    GENERATE,
    STREAM,
    GeminiContents,
    is_gemini_version,
    model_card,
    model_cards,
    read_address,
)
from rollwright.gateway.legacy_completions import LegacyCompletions
from rollwright.gateway.recorder import PASSING, Given, RolloutRecorder, error_of, refusal_of
from rollwright.gateway.registry import RolloutRegistry
from rollwright.gateway.requests import (
    LONGEST_MODEL,
    NamedRequest,
    RequestHead,
    check_limits,
    check_room,
    name_request,
    read_head,
)
from rollwright.gateway.responses import Responses
from rollwright.gateway.retries import ModelCall
from rollwright.gateway.types import ApiFormat, ModelReply, ModelRequest, decode
from rollwright.store.http.body import Body, BodyMemory, Gone, Message, Receive
from rollwright.store.http.decoding import BodyDecoder, json_values
from rollwright.store.http.errors import HttpRefusal
from rollwright.trajectory import reward_of

Send = Callable[[Message], Awaitable[None]]
Scope = Mapping[str, Any]
Decoded = TypeVar("Decoded")

MAX_BODY = 32 * 1024 * 1024
"""A conversation of a million tokens takes about 5 MiB."""

_APIS: dict[tuple[str, ...], ApiFormat] = {
    ("chat", "completions"): ChatCompletions(),
    ("responses",): Responses(),
    ("messages",): AnthropicMessages(),
    ("completions",): LegacyCompletions(),
}

_COUNTS: dict[tuple[str, ...], ApiFormat] = {
    ("messages", "count_tokens"): _APIS["messages",],
    ("responses", "input_tokens"): _APIS["responses",],
}
"""Paths that tell how many tokens a request would have."""

_PLAIN = _APIS["chat", "completions"]
"""Format of errors if the path names no API."""

MAX_MARKS = 400_000
"""Commas and opening brackets in one request, those in its texts included: a million tokens of code have about
250,000. Were all of them values, they would be decoded within 50 ms."""

_FEW_BYTES, _FEW_MARKS = 256 * 1024, 5_000
"""Bytes and marks up to which a request is decoded in the event loop, within a millisecond: long texts are copied, and only
values take time. A request of Claude Code has about 80 KB and 1,500 marks."""

_JSON = b"application/json"

_encode = msgspec.json.Encoder().encode
_log = logging.getLogger(__name__)


class EndRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to end a rollout, by its agent or by its judge."""

    reward: float | msgspec.UnsetType = msgspec.UNSET
    success: bool | None = None
    error: str | None = None
    """Why the attempt failed; it is then retried by its retry rules."""
    returned: Any = msgspec.UNSET
    """The value that the agent came to, which rewards judge."""

    def __post_init__(self) -> None:
        try:
            reward_of(self.given_reward, "the reward")
        except FormatError as error:
            raise ValueError(str(error)) from error  # which the decoder tells as it tells any wrong field

    @property
    def given_reward(self) -> float:
        """0 where none is given."""
        return 0.0 if isinstance(self.reward, msgspec.UnsetType) else self.reward


class Administration(Protocol):
    """Additional operations for programs that are not started by the gateway's owner: opening and ending rollouts."""

    polls: bool
    """Whether `create` may wait for long, and is cancelled when its client disconnects."""

    def admit(self, rollout_id: str | None, key: bytes | None) -> None:
        """Raises unless the key may open rollouts (`None`) or end this rollout."""
        ...

    async def create(self, key: bytes | None, body: bytes, claim_id: str | None) -> Mapping[str, Any]: ...

    async def end(self, rollout_id: str, key: bytes | None, request: EndRequest) -> Mapping[str, Any]: ...


_END = msgspec.json.Decoder(EndRequest)


class GatewayApp:
    """The ASGI app."""

    def __init__(
        self,
        registry: RolloutRegistry,
        administration: Administration | None = None,
        max_body: int = MAX_BODY,
    ) -> None:
        self._registry = registry
        self._administration = administration
        self._max_body = max_body
        self._memory = BodyMemory()
        self._decoder = BodyDecoder()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = tuple(scope["raw_path"].decode("latin-1").split("/")[1:])
        query = scope.get("query_string", b"")
        served = _find_served(_tail(path), query)
        api = _PLAIN if served is None else served.api
        body = Body(receive, self._max_body, self._memory)
        try:
            await self.route(scope, path, read_head(scope["headers"], query), body, receive, send)
        except HttpRefusal as refusal:
            message = " ".join(str(refusal).splitlines())
            last = body.unread or refusal.status == 401
            await _send_error(send, api, refusal.status, refusal.kind, message, last=last)
        except Gone:
            return
        except Exception:  # noqa: BLE001 - whatever went wrong, the client gets one line
            _log.exception("%s failed", scope["path"])
            words = "the gateway failed; its log says why"
            await _send_error(send, api, 500, "internal", words, last=body.unread)

    async def route(
        self, scope: Scope, path: tuple[str, ...], head: RequestHead, body: Body, receive: Receive, send: Send
    ) -> None:
        """Serves one request; raises its refusal."""
        method = scope["method"]
        match (method, *path):
            case ("GET", "health"):
                await send_json(send, {"status": "ok"})
            case ("POST", "rollouts") if self._administration is not None:
                await self._create(self._administration, head, body, receive, send)
            case ("POST", "rollouts", quoted, "end"):
                await self._end(unquote(quoted), head, body, send)
            case ("POST", "rollouts", quoted, "heartbeat"):
                self._registry.find(unquote(quoted), head.key).note_sign_of_life()
                await send_json(send, {"status": "ok"})
            case ("GET", "rollouts", quoted, "trajectory"):
                rollout = self._registry.find(unquote(quoted), head.key)
                await _send(send, 200, b"application/octet-stream", rollout.session.trajectory.to_bytes())
            case ("GET", "rollouts", quoted, *_) if _tail(path)[:1] == ("models",):
                self._registry.find(unquote(quoted), head.key)
                # A name may have slashes in it, as those of hubs have.
                name = unquote("/".join(_tail(path)[1:]))[:LONGEST_MODEL]
                if is_gemini_version(path[2]):
                    await send_json(send, model_card(name) if name else model_cards(["policy"]))
                else:
                    await send_json(send, _model(name) if name else _models())
            case ("POST", "rollouts", quoted, *_):
                rollout = self._registry.find(unquote(quoted), head.key)
                served = _find_served(_tail(path), scope.get("query_string", b""))
                try:
                    if served is None:
                        raise _not_served(method, path)
                    await self._call_model(rollout, served, head, body, receive, send)
                except HttpRefusal as refusal:
                    if refusal.status in (400, 404, 422):
                        rollout.note_refusal(refusal)
                    raise
            case _:
                raise _not_served(method, path)

    async def _call_model(
        self,
        rollout: RolloutRecorder,
        served: "_Served",
        head: RequestHead,
        body: Body,
        receive: Receive,
        send: Send,
    ) -> None:
        if served.counts:
            await self._count(rollout, served.api, head, body, send)
        else:
            read = partial(name_request, served.api, idempotency_key=head.idempotency_key)
            named = await self.read(head, body, read)
            await self._ask(rollout, served.api, named, head, receive, send)

    async def _count(
        self, rollout: RolloutRecorder, api: ApiFormat, head: RequestHead, body: Body, send: Send
    ) -> None:
        asked = await self.read(head, body, api.read_to_count)
        check_limits(asked)
        tokens = await asyncio.to_thread(rollout.count_tokens, asked, head.agent)
        await send_json(send, api.answer_count(tokens))

    async def read(self, head: RequestHead, body: Body, decode: Callable[[bytes], Decoded]) -> Decoded:
        """Parses the body of an authenticated client; the raw bytes are not kept."""
        if head.length > self._max_body:
            raise body.too_large()
        with body:
            content = await body.read()
            if len(content) <= _FEW_BYTES and json_values(content, _FEW_MARKS) <= _FEW_MARKS:
                return decode(content)  # the way to a thread and back would take longer
            return await self._decoder.decode(decode, content, json_values, MAX_MARKS)

    async def _create(
        self, administration: Administration, head: RequestHead, body: Body, receive: Receive, send: Send
    ) -> None:
        administration.admit(None, head.key)
        content = await self.read(head, body, bytes)
        claim_id = None if head.idempotency_key is None else head.idempotency_key.decode("latin-1")
        create = administration.create(head.key, content, claim_id)
        if not administration.polls:
            await send_json(send, await create)
            return
        opening, gone = asyncio.ensure_future(create), asyncio.ensure_future(receive())
        try:
            await asyncio.wait({opening, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                raise Gone  # nobody is there who could play it
            await send_json(send, opening.result())
        finally:
            opening.cancel()
            gone.cancel()

    async def _end(self, rollout_id: str, head: RequestHead, body: Body, send: Send) -> None:
        if self._administration is not None:
            self._administration.admit(rollout_id, head.key)
            request = await self.read(head, body, _end_request)
            await send_json(send, await self._administration.end(rollout_id, head.key, request))
            return
        rollout = self._registry.find(rollout_id, head.key)
        request = await self.read(head, body, _end_request)
        if request.error is not None:
            raise HttpRefusal(400, "unsupported", "error: raise it in the agent function instead")
        rollout.given = Given(request.given_reward, request.success)
        await rollout.seal()
        await send_json(send, {"status": "sealed"})

    async def _ask(
        self,
        rollout: RolloutRecorder,
        api: ApiFormat,
        named: NamedRequest,
        head: RequestHead,
        receive: Receive,
        send: Send,
    ) -> None:
        asked = named.asked
        check_limits(asked)
        check_room(rollout, named, head.agent)
        marked = head.marked or head.idempotency_key is not None
        call = rollout.call(api, asked, named.name, marked=marked, agent=head.agent)
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({call.task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not call.task.done():
                raise Gone
            error = error_of(call.task)
            if error is not None:
                raise refusal_of(error)
            await _tell(send, api, asked, call.task.result(), call, gone)
        finally:
            gone.cancel()
            call.clients -= 1


async def _tell(
    send: Send,
    api: ApiFormat,
    asked: ModelRequest,
    reply: ModelReply,
    call: ModelCall,
    gone: "asyncio.Future[Any]",
) -> None:
    if not asked.stream:
        content = _encode(api.answer(asked, reply))
        await asyncio.sleep(0)  # a client that has left by now is noticed in the loop's next step
        if gone.done():
            raise Gone
        call.delivered = (
            True  # as far as anybody here can tell; a client that missed it says so when it repeats
        )
        await _send(send, 200, _JSON, content, *_note_headers(asked))
        return
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        *_note_headers(asked),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for event in api.events(asked, reply):
        if gone.done():
            raise Gone
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await asyncio.sleep(0)
    if gone.done():
        raise Gone
    call.delivered = True
    await send({"type": "http.response.body", "body": b""})


def _note_headers(asked: ModelRequest) -> list[tuple[bytes, bytes]]:
    """Headers that name the options which were ignored."""
    return [(b"x-rollwright-note", each.encode("ascii", "replace")) for each in asked.notes]


def _model(name: str) -> dict[str, Any]:
    """A model in the words of both houses; any name is the policy."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "rollwright",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


def _models() -> dict[str, Any]:
    ends = {"first_id": "policy", "last_id": "policy", "has_more": False}
    return {"object": "list", "data": [_model("policy")], **ends}


def _end_request(body: bytes) -> EndRequest:
    request: EndRequest = decode(_END, body)
    return request


def _tail(path: tuple[str, ...]) -> tuple[str, ...]:
    """The path after `/rollouts/ID/v1`. Some SDKs add another `v1`, so any number of versions is accepted."""
    tail = path[2:]
    while tail and (tail[0] == "v1" or is_gemini_version(tail[0])):
        tail = tail[1:]
    return tail


class _Served(NamedTuple):
    """What an address offers."""

    api: ApiFormat
    counts: bool
    """Whether it tells how many tokens a request would have, instead of answering it."""


def _find_served(tail: tuple[str, ...], query: bytes) -> _Served | None:
    if (api := _APIS.get(tail)) is not None:
        return _Served(api, False)
    if (api := _COUNTS.get(tail)) is not None:
        return _Served(api, True)
    if (address := read_address(tail)) is None:
        return None
    model, method = address
    events = b"alt=sse" in query.split(b"&")
    streams = method == STREAM
    return _Served(GeminiContents(model, streams and events, streams and not events), method == COUNT)


def _not_served(method: str, path: tuple[str, ...]) -> HttpRefusal:
    known = ", ".join("/".join(("v1", *tail)) for tail in (*_APIS, *_COUNTS))
    known += f", v1beta/models/MODEL:{GENERATE}"
    return HttpRefusal(
        404, "not_served", f"{method} {'/'.join(('', *path))[:80]} is not served; a rollout's are: {known}"
    )


async def send_json(send: Send, answer: Any) -> None:
    await _send(send, 200, _JSON, _encode(answer))


async def _send_error(
    send: Send, api: ApiFormat, status: int, kind: str, message: str, *, last: bool = False
) -> None:
    """Sends an error. `last`: the connection is closed after it."""
    more = [(b"x-should-retry", b"true" if status in PASSING else b"false")]
    if last:
        more.append((b"connection", b"close"))
    await _send(send, status, _JSON, _encode(api.error(status, kind, message)), *more)


async def _send(send: Send, status: int, kind: bytes, content: bytes, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
