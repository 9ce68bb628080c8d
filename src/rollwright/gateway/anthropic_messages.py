"""Anthropic's messages: `POST /v1/messages`."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from rollwright.engines.base import OfferedTools, ToolSpec
from rollwright.gateway.types import (
    ModelReply,
    ModelRequest,
    ReadTools,
    Wishes,
    check_messages,
    choose_tools,
    decode,
    event,
    keep_read,
    output_format,
    passed_over,
    present_object_arguments,
    read_arguments,
    refuse_options,
    sampling_options,
    text_of,
    tool_call,
)
from rollwright.store.http.errors import HttpRefusal
from rollwright.trajectory import FinishReason, Message, ToolCall

_NEUTRAL: dict[str, Any] = {"container": None}
"""Options that cannot be honoured, and the value under which they do nothing."""

_SAMPLING: dict[str, tuple[Any, ...]] = {"top_k": (-1, 0)}
"""Settings that change the distribution, and their neutral values."""

_IGNORED_BLOCKS = ("thinking", "redacted_thinking")
"""Blocks that are ignored: earlier reasoning is in the sampled ids already, if the model's format keeps it."""

_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_SIGNATURE = "none"
"""Clients expect a signature with each thinking block; this one is never verified."""


class _Tool(msgspec.Struct):
    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class _Request(msgspec.Struct):
    messages: list[_Message]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    model: str = ""
    system: str | list[Any] | None = None
    tools: msgspec.Raw = msgspec.Raw(b"null")
    tool_choice: Any = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    top_k: Any = None
    mcp_servers: list[Any] | None = None
    output_format: Any = None
    output_config: Any = None
    container: Any = None


_DECODER = msgspec.json.Decoder(_Request)
_TOOLS = msgspec.json.Decoder(list[_Tool] | None)
_json = msgspec.json


@keep_read
def _read_tools(raw: bytes) -> ReadTools:
    """The client's tools, and the kinds of those that the provider would run itself."""
    given: list[_Tool] = decode(_TOOLS, raw) or []
    specs = OfferedTools(
        ToolSpec(tool.name, tool.description or "", tool.input_schema)
        for tool in given
        if tool.input_schema is not None
    )
    return ReadTools(specs, tuple(tool.type or tool.name for tool in given if tool.input_schema is None))


class AnthropicMessages:
    def read(self, body: bytes) -> ModelRequest:
        request: _Request = decode(_DECODER, body)
        if request.max_tokens is None:
            raise HttpRefusal(422, "invalid", "max_tokens is missing: this API asks for it")
        return self._read(request)

    def read_to_count(self, body: bytes) -> ModelRequest:
        return self._read(decode(_DECODER, body))

    def answer_count(self, tokens: int) -> Mapping[str, Any]:
        return {"input_tokens": tokens}

    def _read(self, request: _Request) -> ModelRequest:
        refuse_options(request, _NEUTRAL)
        messages: list[Message] = []
        if system := text_of(request.system, "system"):
            messages.append(Message("system", system))
        for place, each in enumerate(request.messages):
            messages.extend(_messages(each, f"messages[{place}]"))
        specs, given_theirs = _read_tools(bytes(request.tools))
        tools, forced = choose_tools(specs, request.tool_choice)
        theirs = list(given_theirs)
        if request.mcp_servers:
            theirs.append("mcp_servers")
        config = request.output_config if isinstance(request.output_config, dict) else {}
        wanted = request.output_format or config.get("format")
        return ModelRequest(
            messages=check_messages(messages),
            model=request.model,
            tools=tools,
            wishes=Wishes(
                request.temperature,
                request.top_p,
                request.max_tokens,
                tuple(request.stop_sequences or ()),
                sampling_options(request, _SAMPLING),
            ),
            stream=bool(request.stream),
            output=forced or output_format(wanted, tools, "output_format"),
            notes=passed_over(theirs),
        )

    def present(self, asked: ModelRequest, message: Message) -> Message:
        return present_object_arguments(message)

    def answer(self, asked: ModelRequest, reply: ModelReply) -> Mapping[str, Any]:
        return {
            "id": f"msg_{reply.name}",
            "type": "message",
            "role": "assistant",
            "model": asked.model,
            "content": _blocks(reply.message),
            "stop_reason": _stop_reason(reply),
            "stop_sequence": reply.stop_sequence,
            "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
        }

    def events(self, asked: ModelRequest, reply: ModelReply) -> Iterator[bytes]:
        def one(kind: str, **data: Any) -> bytes:
            return event({"type": kind, **data}, kind)

        opening = {**self.answer(asked, reply), "content": [], "stop_reason": None, "stop_sequence": None}
        opening["usage"] = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
        yield one("message_start", message=opening)
        for index, block in enumerate(_blocks(reply.message)):
            empty, deltas = _in_parts(block)
            yield one("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield one("content_block_delta", index=index, delta=delta)
            yield one("content_block_stop", index=index)
        yield one(
            "message_delta",
            delta={"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_sequence},
            usage={"output_tokens": reply.completion_tokens},
        )
        yield one("message_stop")

    def error(self, status: int, kind: str, message: str) -> Mapping[str, Any]:
        type = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": type, "message": message}}


def _messages(given: _Message, where: str) -> Iterator[Message]:
    """Splits a user message into one message for each tool result and one for the rest."""
    if isinstance(given.content, str):
        yield Message(given.role, given.content)
        return
    texts: list[Any] = []
    calls: list[ToolCall] = []
    for block in given.content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            content = text_of(block.get("content"), where)
            yield Message("tool", content, tool_call_id=str(block.get("tool_use_id")))
        elif kind == "tool_use":
            calls.append(tool_call(block.get("id"), block.get("name"), block.get("input", {}), where))
        elif kind not in _IGNORED_BLOCKS:
            texts.append(block)
    if texts or given.role == "assistant":
        yield Message(given.role, text_of(texts, where), tool_calls=tuple(calls))


def _blocks(said: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if said.reasoning:
        blocks.append({"type": "thinking", "thinking": said.reasoning, "signature": _SIGNATURE})
    if said.content or not said.tool_calls:
        blocks.append({"type": "text", "text": said.content})
    blocks.extend(
        {"type": "tool_use", "id": call.id, "name": call.name, "input": read_arguments(call)}
        for call in said.tool_calls
    )
    return blocks


def _in_parts(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as stream events: first empty, then its content."""
    if block["type"] == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        empty = {"type": "thinking", "thinking": "", "signature": ""}
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        return empty, [thought, {"type": "signature_delta", "signature": _SIGNATURE}]
    arguments = _json.encode(block["input"]).decode()
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _stop_reason(reply: ModelReply) -> str:
    if reply.finish is not FinishReason.STOP:
        return "max_tokens"
    if reply.stop_sequence is not None:
        return "stop_sequence"
    return "tool_use" if reply.message.tool_calls else "end_turn"
