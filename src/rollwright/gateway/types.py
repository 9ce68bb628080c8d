"""Provider-neutral request and response types.

Each API format parses a body into a `ModelRequest` and writes a `ModelReply`, whole or as server-sent events. A client's
sampling parameters apply only if the rollout's rules allow it. Any other option that would change the answer and is not
supported is refused; an option without effect is ignored.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from rollwright.engines.base import Sampling, ToolSpec
from rollwright.store.http.errors import HttpRefusal
from rollwright.trajectory import FinishReason, Message, ToolCall


class Wishes(msgspec.Struct, frozen=True):
    """Sampling parameters that a client requests for one call; `None`: the rollout's."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    """Names of further parameters that would change the distribution: `top_k`, penalties, `logit_bias`."""

    def within(self, bounds: Sampling, *, honoured: bool) -> Sampling:
        """Sampling of the call: at most the tokens that the rollout allows, and always the client's stop strings. The
        client's temperature and top_p apply only if `honoured`."""
        if self == _NO_WISHES:
            return bounds
        if honoured and self.other:
            raise refuse(f"{self.other[0]} is not supported: leave it out")
        temperature, top_p = (self.temperature, self.top_p) if honoured else (None, None)
        return Sampling(
            temperature=bounds.temperature if temperature is None else temperature,
            top_p=bounds.top_p if top_p is None else top_p,
            max_tokens=min(bounds.max_tokens, self.max_tokens or bounds.max_tokens),
            stop=tuple(each for each in dict.fromkeys((*bounds.stop, *self.stop)) if each),
        )

    def apart_from(self, bounds: Sampling) -> bool:
        """Whether the requested sampling differs from the rollout's."""
        return (
            self.temperature not in (None, bounds.temperature)
            or self.top_p not in (None, bounds.top_p)
            or bool(self.other)
        )


_NO_WISHES = Wishes()


class ModelRequest(msgspec.Struct, frozen=True):
    """One call of a client."""

    messages: tuple[Message, ...]
    """The whole conversation, or the messages after `previous`."""
    model: str = ""
    """Model name from the client; returned in the response, otherwise unused."""
    tools: tuple[ToolSpec, ...] = ()
    wishes: Wishes = _NO_WISHES
    stream: bool = False
    stream_usage: bool = False
    """Whether a stream ends with token counts, if the API lets the client choose."""
    instructions: str = ""
    """A separate system message, if the API has one."""
    previous: str | None = None
    """Name of the reply that `messages` follow."""


class ModelReply(msgspec.Struct, frozen=True):
    """The answer to a client: one recorded turn."""

    name: str
    """Unique id; the same in every response for this turn."""
    created: int
    """Seconds since 1970."""
    message: Message
    """The assistant's message as the client sees it."""
    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int
    sampling: Sampling
    """Sampling parameters that were used."""
    turn_id: int
    stop_sequence: str | None = None
    """The client's stop string that ended it; `None`: none did."""


class ApiFormat(Protocol):
    """One provider's API: how requests are read and replies written."""

    def read(self, body: bytes) -> ModelRequest:
        """Parses a body; raises `HttpRefusal` for an invalid or unsupported request."""
        ...

    def present(self, message: Message) -> Message:
        """Converts the message to the form that this API supports."""
        ...

    def answer(self, asked: ModelRequest, reply: ModelReply) -> Mapping[str, Any]: ...

    def events(self, asked: ModelRequest, reply: ModelReply) -> Iterable[bytes]:
        """The answer as server-sent events."""
        ...

    def error(self, status: int, kind: str, message: str) -> Mapping[str, Any]: ...


_encode = msgspec.json.Encoder().encode


def decode(decoder: "msgspec.json.Decoder[Any]", body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise HttpRefusal(422, "invalid", str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpRefusal(400, "malformed", f"the body cannot be read: {error}") from None


def refuse(what: str) -> HttpRefusal:
    return HttpRefusal(400, "unsupported", what)


def refuse_options(request: Any, neutral: Mapping[str, Any]) -> None:
    """Refuses options that would change the sampled tokens, unless they have their neutral value."""
    for name, harmless in neutral.items():
        value = getattr(request, name)
        if value is not None and value != harmless:
            shown = _encode(value).decode()[:80]
            raise refuse(f"{name}={shown} is not supported: leave it out")


def sampling_options(request: Any, neutral: Mapping[str, Sequence[Any]]) -> tuple[str, ...]:
    """Names of the given parameters that would change the distribution. `neutral`: values of each without an effect."""
    named = ((name, getattr(request, name)) for name in neutral)
    return tuple(name for name, value in named if value is not None and value not in neutral[name])


def offered(tools: Iterable[ToolSpec], choice: Any) -> tuple[ToolSpec, ...]:
    """The tools in the prompt; with `none`, no tools. The model cannot be forced to call one."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in (None, "auto", "none"):
        raise refuse("tool_choice: only auto and none are supported")
    return () if kind == "none" else tuple(tools)


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Plain text, or the text of a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise HttpRefusal(422, "invalid", f"{where}: content is neither text nor a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise refuse(f"{where}: a part of type {kind!r} is not supported: only text is")
        texts.append(part["text"])
    return "\n".join(texts)


def check_messages(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Validates a conversation, and fills in the tool name of each tool result from its call."""
    names: dict[str, str] = {}
    found = []
    for message in messages:
        for call in message.tool_calls:
            names[call.id] = call.name
        if message.role == "tool" and message.name is None and message.tool_call_id in names:
            message = msgspec.structs.replace(message, name=names[message.tool_call_id])
        found.append(message)
    if not found:
        raise HttpRefusal(422, "invalid", "there is no message to answer")
    if found[-1].role == "assistant":
        raise refuse("the last message is the assistant's: continuing a given answer is not supported")
    return tuple(found)


def tool_call(id: Any, name: Any, arguments: Any, where: str) -> ToolCall:
    if not (isinstance(id, str) and isinstance(name, str)):
        raise HttpRefusal(422, "invalid", f"{where}: a tool call needs an id and a name")
    return ToolCall(id, name, arguments if isinstance(arguments, str) else _encode(arguments).decode())


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (head, data if isinstance(data, bytes) else _encode(data))
