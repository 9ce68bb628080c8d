"""The OpenAI-compatible chat and completions APIs as pure code: prompt to request body, response body to generation.

Always true: both APIs return text without ids, so their generations are marked as not exact. Chat completions support tools;
plain completions do not, and a request with tools is an error. Only needed fields of a response are decoded.

A field of the user's `extra_body` that may change the sampled distribution is recorded with the turn, under its own name if it
is known; an unknown field counts as one that may. So no setting changes the trained distribution unnoticed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Protocol

import msgspec

from rollwright.engines.base import EngineError, Generation, Prompt, Renderer, Sampling, ToolSpec
from rollwright.engines.constraints import chat_fields
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
"""Fields that affect scheduling, the format of the response or the end of a completion, but no token's probability."""


def shaping(extra_body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `SamplingParams` that these request fields set; raise a `ConfigError` for a value of the wrong type."""
    found = {name: extra_body[name] for name in sorted(extra_body.keys() & _NUMBERS)}
    if isinstance(found.get("top_k"), int):
        found["top_k"] = max(found["top_k"], 0)  # vLLM and SGLang write -1 for no limit
    try:
        msgspec.convert(found, SamplingParams)
    except msgspec.ValidationError as error:
        raise ConfigError(f"extra_body: {error}") from None
    if others := sorted(extra_body.keys() - _NUMBERS - _HARMLESS):
        found["other"] = tuple(others)
    return found


def sent(sampling: Sampling, shaped: Mapping[str, Any]) -> SamplingParams | None:
    """The sampling settings that the engine gets with `shaped` fields; `None`: the requested ones."""
    if not shaped:
        return None
    return msgspec.structs.replace(sampling.params(), **shaped)


_OWN_FIELDS = ("model", "messages", "prompt", "stream", "n", "tools", "functions")
"""Fields of the body that `extra_body` must not set: the client makes them, or relies on their default."""

_NEXT_SPEAKER = "\n\nuser:"
"""Stop string: here a text model starts to write the user's turn."""

NO_TOOLS = "plain completions do not support tools; accepted: `api: chat`, or an engine with token ids"

_SHOWN = 300
"""Characters of a server's message in an error: enough for a sentence, not for a page of HTML."""

_FINISHES = {
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "content_filter": FinishReason.ABORT,
}
"""Any other value (`stop`, `eos`, `tool_calls`, none) means that the model ended its turn."""

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions that decoding raises on arbitrary bytes."""

_NOT_EMPTY = msgspec.Meta(min_length=1)
_Count = Annotated[int, msgspec.Meta(ge=0)]

_encode = msgspec.json.Encoder().encode


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Count | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None
    prompt_cache_hit_tokens: _Count | None = None
    """DeepSeek's name for cached tokens."""

    @property
    def cached(self) -> int:
        details = self.prompt_tokens_details
        told = self.prompt_cache_hit_tokens if details is None else details.cached_tokens
        return min(told or 0, self.prompt_tokens or 0)

    @property
    def reasoning(self) -> int:
        details = self.completion_tokens_details
        return min((details and details.reasoning_tokens) or 0, self.completion_tokens or 0)


class _CalledFunction(msgspec.Struct):
    name: Annotated[str, _NOT_EMPTY]
    arguments: str | dict[str, Any] | None = None
    """JSON as text; some servers send the object itself."""


class _ToolCall(msgspec.Struct):
    function: _CalledFunction
    id: str | None = None


class _ChatMessage(msgspec.Struct):
    content: str | None = None
    """Null if the model wrote no text, for example when it only calls tools."""
    tool_calls: list[_ToolCall] | None = None
    reasoning_content: str | None = None
    """Reasoning, as vLLM, SGLang and DeepSeek name it."""
    reasoning: str | dict[str, Any] | None = None
    """Reasoning, as OpenRouter and newer vLLM name it."""

    @property
    def thought(self) -> str:
        if self.reasoning_content:
            return self.reasoning_content
        return self.reasoning if isinstance(self.reasoning, str) else ""


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
    """One API of an OpenAI-compatible server."""

    @property
    def path(self) -> str:
        """Path below the base URL."""
        ...

    @property
    def renderer(self) -> Renderer | None:
        """`None` for an API that speaks text only."""
        ...

    @property
    def takes_tools(self) -> bool:
        """Whether requests can carry tools."""
        ...

    def request(self, prompt: Prompt, sampling: Sampling) -> bytes: ...

    def sent(self, sampling: Sampling) -> SamplingParams | None:
        """The sampling settings that the engine gets, if they differ from the requested ones; `None`: they do not."""
        ...

    def response(self, body: bytes) -> Generation:
        """Parse a response; raise `FormatError` for anything but a whole completion."""
        ...


@dataclass(frozen=True)
class _WithExtra:
    """The handling of `extra_body`, common to both APIs."""

    model: str
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    token_limit: str = "max_tokens"
    """Name of the field with the token limit."""
    omit: tuple[str, ...] = ()
    """Fields that are not sent, because the API refuses them."""

    def __post_init__(self) -> None:
        _check_extra(self.extra_body)
        self._shaped  # noqa: B018 - raises for a value of the wrong type

    @cached_property
    def _shaped(self) -> Mapping[str, Any]:
        return shaping(self.extra_body)

    def sent(self, sampling: Sampling) -> SamplingParams | None:
        return sent(sampling, self._shaped)

    def _fields(self, sampling: Sampling, stop: Sequence[str]) -> dict[str, Any]:
        fields = _fields(self.model, sampling, stop, self.token_limit)
        return (
            {name: value for name, value in fields.items() if name not in self.omit} if self.omit else fields
        )


@dataclass(frozen=True)
class ChatApi(_WithExtra):
    """`/chat/completions`: the server renders the messages by its own chat template."""

    path = "/chat/completions"
    renderer = None
    takes_tools = True

    def request(self, prompt: Prompt, sampling: Sampling) -> bytes:
        fields = self._fields(sampling, sampling.stop)
        fields["messages"] = [
            _written(each)
            if each.tool_calls or each.reasoning or each.tool_call_id or each.name or each.role == "tool"
            else each  # most messages are a role and a text, which msgspec encodes without a dict
            for each in prompt.messages
        ]
        if prompt.tools:
            fields["tools"] = [_offered(tool) for tool in prompt.tools]
        if sampling.output is not None:
            fields |= chat_fields(sampling.output)
        return _encode({**fields, **self.extra_body})

    def response(self, body: bytes) -> Generation:
        try:
            decoded = _decode_chat(body)
        except _UNREADABLE as error:
            raise _broken(error, body) from error
        choice = decoded.choices[0]
        said = choice.message
        made = _generation(said.content or "", choice.finish_reason, decoded.usage)
        if not said.tool_calls and not said.thought:
            return made
        return msgspec.structs.replace(made, tool_calls=_calls(said.tool_calls or ()), reasoning=said.thought)


@dataclass(frozen=True)
class CompletionsApi(_WithExtra):
    """`/completions`: the prompt is the conversation as a plain transcript, for models without a chat template."""

    path = "/completions"
    renderer = None
    takes_tools = False

    def request(self, prompt: Prompt, sampling: Sampling) -> bytes:
        if prompt.tools:
            raise EngineError(NO_TOOLS)
        fields = self._fields(sampling, (*sampling.stop, _NEXT_SPEAKER))
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
    """A message in the API's format. Reasoning is not sent back, because some servers refuse it."""
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
    """Tool calls with unique ids; missing and repeated ids are replaced."""
    found: list[ToolCall] = []
    for place, call in enumerate(told):
        arguments = call.function.arguments
        text = arguments if isinstance(arguments, str) else _encode(arguments or {}).decode()
        taken = not call.id or any(each.id == call.id for each in found)
        found.append(ToolCall(f"call_{place}" if taken or not call.id else call.id, call.function.name, text))
    return tuple(found)


def transcript(messages: Sequence[Message]) -> str:
    """The conversation as text, up to the start of the assistant's turn."""
    return "".join(f"{message.role}: {message.content}\n\n" for message in messages) + "assistant:"


def server_message(body: bytes) -> str:
    """A server's error message in one line, from the fields where common servers put it."""
    try:
        found: Any = msgspec.json.decode(body)
    except _UNREADABLE:
        return one_line(body.decode(errors="replace"))
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return one_line(found if isinstance(found, str) else _encode(found).decode())


def one_line(text: str) -> str:
    """The text without line breaks, cut to the length of an error message."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"


def _fields(model: str, sampling: Sampling, stop: Sequence[str], token_limit: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": model,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        token_limit: sampling.max_tokens,
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
        cached_tokens=0 if usage is None else usage.cached,
        reasoning_tokens=0 if usage is None else usage.reasoning,
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
