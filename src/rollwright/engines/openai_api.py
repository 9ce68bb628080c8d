"""What a user's further request fields (`extra_body`) do to the distribution that is sampled from. Pure.

Always true: a field that may change the distribution is recorded with the turn, under its own name where it is known;
a field that nobody knows counts as one that may. So no setting can shape what is trained behind the trainer's back.

The two OpenAI-compatible calls as pure code: a prompt to a request body, a response body to a generation.

Only the fields that are needed are read; the others are skipped, not built. Both calls give text without the
ids behind it, so their generations are marked as not exact. Chat completions take tools and tell the calls apart from
the text; plain completions know of no tools, and asking for some is an error. A call that returns ids has a renderer and makes
exact generations; the client needs to know no more of it than of these two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Protocol

import msgspec

from rollwright.engines.base import EngineError, Generation, Prompt, Renderer, Sampling, ToolSpec
from rollwright.errors import ConfigError, FormatError
from rollwright.trajectory import FinishReason, Message, SamplingParams, ToolCall

_NUMBERS = frozenset(SamplingParams.__struct_fields__) - {"other"}

_HARMLESS = frozenset(
    {
        "add_special_tokens",
        "cache_salt",
        "include_stop_str_in_output",
        "metadata",
        "parallel_tool_calls",
        "priority",
        "request_id",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "seed",
        "service_tier",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "store",
        "user",
    }
)
"""Fields that change who is served when, what comes back, or where a completion ends: no token's probability."""


def shaping(extra_body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `SamplingParams` that these request fields set; raises a `ConfigError` for a value of a wrong kind."""
    found = {name: extra_body[name] for name in sorted(extra_body.keys() & _NUMBERS)}
    if isinstance(found.get("top_k"), int):
        found["top_k"] = max(found["top_k"], 0)  # vLLM and SGLang say -1 for all
    try:
        msgspec.convert(found, SamplingParams)
    except msgspec.ValidationError as error:
        raise ConfigError(f"extra_body: {error}") from None
    if others := sorted(extra_body.keys() - _NUMBERS - _HARMLESS):
        found["other"] = tuple(others)
    return found


def sent(sampling: Sampling, shaped: Mapping[str, Any]) -> SamplingParams | None:
    """What an engine is told where `shaping` found something; `None`: what was asked for."""
    if not shaped:
        return None
    return msgspec.structs.replace(sampling.params(), **shaped)


_OWN_FIELDS = ("model", "messages", "prompt", "stream", "n", "tools", "functions")
"""Fields of the body that `extra_body` must not set: the client makes them, or relies on their default."""

_NEXT_SPEAKER = "\n\nuser:"
"""Where a text model stops its turn and begins to write the user's: never part of a completion."""

NO_TOOLS = "plain completions know of no tools; accepted: `api: chat`, or an engine with token ids"

_SHOWN = 300
"""Characters of a server's words in an error: enough for a sentence, not for a page of HTML."""

_FINISHES = {
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "content_filter": FinishReason.ABORT,
}
"""Everything else (`stop`, `eos`, `tool_calls`, nothing at all) means that the model ended its turn."""

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises on bytes of any kind."""

_NOT_EMPTY = msgspec.Meta(min_length=1)
_Count = Annotated[int, msgspec.Meta(ge=0)]

_encode = msgspec.json.Encoder().encode


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _CalledFunction(msgspec.Struct):
    name: Annotated[str, _NOT_EMPTY]
    arguments: str | dict[str, Any] | None = None
    """JSON as text; some servers send the object itself."""


class _ToolCall(msgspec.Struct):
    function: _CalledFunction
    id: str | None = None


class _ChatMessage(msgspec.Struct):
    content: str | None = None
    """Null where the model wrote nothing, for example when it only calls tools."""
    tool_calls: list[_ToolCall] | None = None


class _ChatChoice(msgspec.Struct):
    message: _ChatMessage
    finish_reason: str | None = None


class _ChatResponse(msgspec.Struct):
    choices: Annotated[list[_ChatChoice], _NOT_EMPTY]
    usage: _Usage | None = None


class _TextChoice(msgspec.Struct):
    text: str
    finish_reason: str | None = None


class _TextResponse(msgspec.Struct):
    choices: Annotated[list[_TextChoice], _NOT_EMPTY]
    usage: _Usage | None = None


_decode_chat = msgspec.json.Decoder(_ChatResponse).decode
_decode_text = msgspec.json.Decoder(_TextResponse).decode


class TextApi(Protocol):
    """One kind of call."""

    @property
    def path(self) -> str:
        """Below the base URL."""
        ...

    @property
    def renderer(self) -> Renderer | None:
        """`None` for a call that takes and gives text only."""
        ...

    @property
    def takes_tools(self) -> bool:
        """Whether the model can be told of tools."""
        ...

    def request(self, prompt: Prompt, sampling: Sampling) -> bytes: ...

    def sent(self, sampling: Sampling) -> SamplingParams | None:
        """What the engine is told, where that is not what was asked for; `None`: it is."""
        ...

    def response(self, body: bytes) -> Generation:
        """Raises `FormatError` for anything but a whole completion."""
        ...


@dataclass(frozen=True)
class _WithExtra:
    """What both calls do with a user's further fields."""

    model: str
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_extra(self.extra_body)
        self._shaped  # noqa: B018 - a value of a wrong kind shows here

    @cached_property
    def _shaped(self) -> Mapping[str, Any]:
        return shaping(self.extra_body)

    def sent(self, sampling: Sampling) -> SamplingParams | None:
        return sent(sampling, self._shaped)


@dataclass(frozen=True)
class ChatApi(_WithExtra):
    """`/chat/completions`: the server's own template makes the prompt of the messages."""

    path = "/chat/completions"
    renderer = None
    takes_tools = True

    def request(self, prompt: Prompt, sampling: Sampling) -> bytes:
        fields = _fields(self.model, sampling, sampling.stop)
        fields["messages"] = [
            _written(each)
            if each.tool_calls or each.reasoning or each.tool_call_id or each.name or each.role == "tool"
            else each  # a role and a text, as nearly every message is: encoded as it stands
            for each in prompt.messages
        ]
        if prompt.tools:
            fields["tools"] = [_offered(tool) for tool in prompt.tools]
        return _encode({**fields, **self.extra_body})

    def response(self, body: bytes) -> Generation:
        try:
            decoded = _decode_chat(body)
        except _UNREADABLE as error:
            raise _broken(error, body) from error
        choice = decoded.choices[0]
        said = choice.message
        made = _generation(said.content or "", choice.finish_reason, decoded.usage)
        if not said.tool_calls:
            return made
        return msgspec.structs.replace(made, tool_calls=_calls(said.tool_calls))


@dataclass(frozen=True)
class CompletionsApi(_WithExtra):
    """`/completions`: the prompt is the conversation as a plain transcript, for models without a template."""

    path = "/completions"
    renderer = None
    takes_tools = False

    def request(self, prompt: Prompt, sampling: Sampling) -> bytes:
        if prompt.tools:
            raise EngineError(NO_TOOLS)
        fields = _fields(self.model, sampling, (*sampling.stop, _NEXT_SPEAKER))
        fields["prompt"] = transcript(prompt.messages)
        return _encode({**fields, **self.extra_body})

    def response(self, body: bytes) -> Generation:
        try:
            decoded = _decode_text(body)
        except _UNREADABLE as error:
            raise _broken(error, body) from error
        choice = decoded.choices[0]
        return _generation(choice.text, choice.finish_reason, decoded.usage)


def _written(message: Message) -> dict[str, Any]:
    """A message as the API takes it. What a model thought is not sent back: some servers refuse it."""
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.tool_call_id or "", "content": message.content}
    if not message.tool_calls:
        return {"role": message.role, "content": message.content}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return {"role": message.role, "content": message.content or None, "tool_calls": calls}


def _offered(tool: ToolSpec) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _calls(told: Sequence[_ToolCall]) -> tuple[ToolCall, ...]:
    """With ids that differ: a server that gives none, or one twice, gets them made up here."""
    found: list[ToolCall] = []
    for place, call in enumerate(told):
        arguments = call.function.arguments
        text = arguments if isinstance(arguments, str) else _encode(arguments or {}).decode()
        taken = not call.id or any(each.id == call.id for each in found)
        found.append(ToolCall(f"call_{place}" if taken or not call.id else call.id, call.function.name, text))
    return tuple(found)


def transcript(messages: Sequence[Message]) -> str:
    """The conversation as text, up to where the assistant speaks next."""
    return "".join(f"{message.role}: {message.content}\n\n" for message in messages) + "assistant:"


def server_message(body: bytes) -> str:
    """What a server says is wrong, in one line, wherever the usual servers put it."""
    try:
        found: Any = msgspec.json.decode(body)
    except _UNREADABLE:
        return one_line(body.decode(errors="replace"))
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return one_line(found if isinstance(found, str) else _encode(found).decode())


def one_line(text: str) -> str:
    """Without line breaks, and cut to what fits an error message."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"


def _fields(model: str, sampling: Sampling, stop: Sequence[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": model,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
    }
    if stop:
        fields["stop"] = stop
    return fields


def _generation(text: str, finish: str | None, usage: _Usage | None) -> Generation:
    return Generation(
        text=text,
        finish=_FINISHES.get(finish or "", FinishReason.STOP),
        exact=False,
        prompt_tokens=(usage and usage.prompt_tokens) or 0,
        completion_tokens=(usage and usage.completion_tokens) or 0,
    )


def _broken(error: Exception, body: bytes) -> FormatError:
    return FormatError(one_line(f"{error}: {server_message(body)}"))


def _check_extra(extra_body: Mapping[str, Any]) -> None:
    for name in _OWN_FIELDS:
        if name in extra_body:
            raise ConfigError(
                f"extra_body.{name}: cannot be set here; accepted: any field but {', '.join(_OWN_FIELDS)}"
            )
    try:
        _encode(extra_body)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"extra_body: not plain data: {error}") from None
