"""Provider-neutral request and response types.

Each API format parses a body into a `ModelRequest` and writes a `ModelReply`, whole or as server-sent events. A client's
sampling parameters apply only if the rollout's rules allow it. A forced tool choice and a JSON format become an
`OutputFormat`. Tools that a provider would run on its own servers are passed over, and named in the request's `notes`. Any
other option that would change the answer and is not supported is refused; an option without effect is ignored.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import msgspec

from rollwright.engines.base import OfferedTools, OutputFormat, Sampling, ToolSpec
from rollwright.engines.constraints import forced_call, json_object, json_schema, or_call
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

    def within(self, bounds: Sampling, output: OutputFormat | None = None, *, honoured: bool) -> Sampling:
        """Sampling of the call: at most the tokens that the rollout allows, always the client's stop strings, and the
        output format. The client's temperature and top_p apply only if `honoured`."""
        if self == _NO_WISHES:
            return bounds if output is None else msgspec.structs.replace(bounds, output=output)
        if honoured and self.other:
            raise refuse(f"{self.other[0]} is not supported: leave it out")
        temperature, top_p = (self.temperature, self.top_p) if honoured else (None, None)
        return Sampling(
            temperature=bounds.temperature if temperature is None else temperature,
            top_p=bounds.top_p if top_p is None else top_p,
            max_tokens=min(bounds.max_tokens, self.max_tokens or bounds.max_tokens),
            stop=tuple(each for each in dict.fromkeys((*bounds.stop, *self.stop)) if each),
            output=output,
        )

    def apart_from(self, bounds: Sampling) -> bool:
        """Whether the requested sampling differs from the rollout's."""
        return (
            self.temperature not in (None, bounds.temperature)
            or self.top_p not in (None, bounds.top_p)
            or bool(self.other)
        )


_NO_WISHES = Wishes()


class ToolOrigin(msgspec.Struct, frozen=True):
    """What a function of the model is for the client."""

    name: str
    namespace: str | None = None
    custom: bool = False


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
    output: OutputFormat | None = None
    """A forced tool call or a JSON format; `None`: any text."""
    choices: int = 1
    """Number of answers that the client wants."""
    logprobs: bool = False
    """Whether the answer names its tokens with their log-probabilities."""
    notes: tuple[str, ...] = ()
    """What of the request was passed over."""
    origins: Mapping[str, ToolOrigin] = {}
    """By name, the functions that are another kind of tool for the client."""

    @property
    def system(self) -> str:
        """The system prompt: separate instructions and system messages."""
        said = [each.content for each in self.messages if each.role == "system"]
        return "\n".join([self.instructions, *said] if self.instructions else said)


class TokenLogprob(msgspec.Struct, frozen=True):
    """One sampled token."""

    text: str
    logprob: float


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
    tokens: tuple[TokenLogprob, ...] = ()
    """Its tokens without the end of turn, if the client asked for them."""
    others: tuple["ModelReply", ...] = ()
    """Further answers, if the client asked for several."""

    @property
    def all(self) -> tuple["ModelReply", ...]:
        return (self, *self.others)


class ApiFormat(Protocol):
    """One provider's API: how requests are read and replies written."""

    def read(self, body: bytes) -> ModelRequest:
        """Parses a body; raises `HttpRefusal` for an invalid or unsupported request."""
        ...

    def read_to_count(self, body: bytes) -> ModelRequest:
        """Parses a body that asks how many tokens a request would have."""
        ...

    def answer_count(self, tokens: int) -> Mapping[str, Any]: ...

    def present(self, asked: ModelRequest, message: Message) -> Message:
        """Converts the message to the form that this API supports, and that its client sends back."""
        ...

    def answer(self, asked: ModelRequest, reply: ModelReply) -> Any:
        """The body of the response, as JSON values."""
        ...

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


LARGEST_KEPT, MOST_KEPT = 512 * 1024, 64
"""Bytes of a list of tools that is kept once it is decoded, and the number of such lists."""


class ReadTools(NamedTuple):
    """The tools of a request."""

    specs: OfferedTools
    theirs: tuple[str, ...]
    """Kinds of tools that the provider would run itself."""


def keep_read(read: Callable[[bytes], ReadTools]) -> Callable[[bytes], ReadTools]:
    """Decodes a list of tools once: an agent sends the same one with every call, and it is most of the request."""
    kept = lru_cache(maxsize=MOST_KEPT)(read)
    return lambda raw: kept(raw) if len(raw) <= LARGEST_KEPT else read(raw)


def choose_tools(tools: Sequence[ToolSpec], choice: Any) -> tuple[tuple[ToolSpec, ...], OutputFormat | None]:
    """The tools in the prompt, and the call that `tool_choice` forces; with `none`, no tools."""
    asked = choice if isinstance(choice, dict) else {"type": choice}
    match asked.get("type"):
        case None | "auto":
            return tools if isinstance(tools, tuple) else tuple(tools), None
        case "none":
            return (), None
        case "required" | "any":
            return tuple(tools), _forced(tools, None)
        case "function" | "tool":
            name = _called_name(asked)
            return tuple(tools), _forced([each for each in tools if each.name == name], name)
        case "allowed_tools":
            inner = asked.get("allowed_tools")
            some: Mapping[str, Any] = inner if isinstance(inner, dict) else asked
            names = [_called_name(each) for each in some.get("tools") or () if isinstance(each, dict)]
            allowed = [each for each in tools if each.name in names]
            if some.get("mode") == "required":
                return tuple(tools), _forced(allowed, None)
            return tuple(allowed), None
        case other:
            shown = _encode(other).decode()[:80]
            raise refuse(
                f"tool_choice: {shown} is not supported; accepted: auto, none, required, a function's name"
            )


def _called_name(choice: Mapping[str, Any]) -> Any:
    function = choice.get("function")
    return function.get("name") if isinstance(function, dict) else choice.get("name")


def _forced(tools: Sequence[ToolSpec], name: Any) -> OutputFormat:
    if not tools:
        wanted = "a tool" if name is None else f"{str(name)[:80]!r}"
        raise refuse(f"tool_choice: wants {wanted}, which is not among the tools")
    return forced_call(tools)


def output_format(asked: Any, tools: Sequence[ToolSpec], where: str) -> OutputFormat | None:
    """The constraint of an output format, in the words of any of the APIs; `None`: text. With tools, one may be called
    instead."""
    if not isinstance(asked, dict):
        return None
    match asked.get("type"):
        case None | "text":
            return None
        case "json_object":
            return or_call(json_object(), tools)
        case "json_schema":
            inner = asked.get("json_schema")
            said = inner if isinstance(inner, dict) else asked
            schema = said.get("schema")
            if not isinstance(schema, dict):
                raise HttpRefusal(
                    422, "invalid", f"{where}: a json_schema needs its schema, which is an object"
                )
            return or_call(json_schema(schema, str(said.get("name") or "")), tools)
        case other:
            shown = _encode(other).decode()[:80]
            raise refuse(f"{where}: {shown} is not supported; accepted: text, json_object, json_schema")


def passed_over(kinds: Iterable[str]) -> tuple[str, ...]:
    """The note about tools that the provider would run; empty without any."""
    named = sorted({each[:80] for each in kinds})
    return (f"tools passed over, because the API would run them itself: {', '.join(named)}",) if named else ()


IMAGES = ("image", "image_url", "input_image")
"""Types of parts that hold an image."""


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
        if kind in IMAGES:
            raise HttpRefusal(
                400, "images", f"{where}: images are not supported: the policy reads text alone"
            )
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


def read_arguments(call: ToolCall) -> Any:
    """The arguments of a call as a value; `None`: they are not JSON."""
    try:
        return msgspec.json.decode(call.arguments or "{}")
    except msgspec.DecodeError:
        return None


def present_object_arguments(message: Message) -> Message:
    """For an API whose arguments are objects: calls with other values are sent as text, so that nothing is lost."""
    readable = tuple(call for call in message.tool_calls if isinstance(read_arguments(call), dict))
    if len(readable) == len(message.tool_calls):
        return message
    odd = [f"{call.name}({call.arguments})" for call in message.tool_calls if call not in readable]
    content = "\n".join(part for part in (message.content, *odd) if part)
    return msgspec.structs.replace(message, content=content, tool_calls=readable)


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (head, data if isinstance(data, bytes) else _encode(data))
