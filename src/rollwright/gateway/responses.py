"""OpenAI's responses: `POST /v1/responses`.

The client may send the whole conversation each time, or name the response that its input follows.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from rollwright.gateway.chat_completions import ChatCompletions, token_logprob
from rollwright.gateway.response_tools import (
    ADDITIONAL_TOOLS,
    ResponseTool,
    additional_tools,
    call_item,
    declare,
    flat_choice,
    present_call,
    read_call,
)
from rollwright.gateway.types import (
    ModelReply,
    ModelRequest,
    Wishes,
    check_messages,
    choose_tools,
    decode,
    event,
    output_format,
    passed_over,
    refuse,
    refuse_options,
    sampling_options,
    text_of,
)
from rollwright.store.http.errors import HttpRefusal
from rollwright.trajectory import FinishReason, Message, ToolCall

_NEUTRAL: dict[str, Any] = {"background": False, "conversation": None, "prompt": None}
"""Options that cannot be honoured, and the value under which they do nothing."""

_SAMPLING: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
}
"""Settings that change the distribution; the API has none of them, but engines that speak it do."""

_PREFIX = "resp_"

_LOGPROBS = "message.output_text.logprobs"
"""Name under which a client asks for log-probabilities."""

_SERVER_ITEMS = re.compile(r".*_call(_output)?|mcp_.*|item_reference|compaction.*")
"""Items of tools that the API would run, which were never offered: they are passed over."""

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class _Text(msgspec.Struct):
    format: dict[str, Any] | None = None


class _Request(msgspec.Struct):
    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Any = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool | None = None
    text: _Text | None = None
    repetition_penalty: Any = None
    top_k: Any = None
    min_p: Any = None
    logit_bias: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    include: list[str] | None = None
    background: Any = None
    conversation: Any = None
    prompt: Any = None


_DECODER = msgspec.json.Decoder(_Request)


class Responses:
    def read(self, body: bytes) -> ModelRequest:
        request: _Request = decode(_DECODER, body)
        refuse_options(request, _NEUTRAL)
        items = request.input
        skipped: list[str] = []
        said = [Message("user", items)] if isinstance(items, str) else _messages(items, skipped)
        declared = declare([*(request.tools or ()), *additional_tools(items)])
        tools, forced = choose_tools(declared.specs, flat_choice(request.tool_choice))
        previous = request.previous_response_id
        return ModelRequest(
            messages=check_messages(said),
            model=request.model,
            tools=tools,
            wishes=Wishes(
                request.temperature,
                request.top_p,
                request.max_output_tokens,
                other=sampling_options(request, _SAMPLING),
            ),
            stream=bool(request.stream),
            instructions=request.instructions or "",
            previous=None if previous is None else previous.removeprefix(_PREFIX),
            output=forced
            or output_format(request.text.format if request.text else None, tools, "text.format"),
            logprobs=_LOGPROBS in (request.include or ()),
            notes=passed_over([*declared.passed_over, *skipped]),
            origins=declared.origins,
        )

    def read_to_count(self, body: bytes) -> ModelRequest:
        return self.read(body)

    def answer_count(self, tokens: int) -> Mapping[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def present(self, asked: ModelRequest, message: Message) -> Message:
        if not asked.origins or not message.tool_calls:
            return message
        calls = tuple(present_call(each, asked.origins) for each in message.tool_calls)
        return msgspec.structs.replace(message, tool_calls=calls)

    def answer(self, asked: ModelRequest, reply: ModelReply) -> Mapping[str, Any]:
        whole = reply.finish is FinishReason.STOP
        return {
            **_head(asked, reply),
            "status": "completed" if whole else "incomplete",
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "output": _items(asked, reply),
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": reply.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            },
        }

    def events(self, asked: ModelRequest, reply: ModelReply) -> Iterator[bytes]:
        for number, (kind, data) in enumerate(self._events(asked, reply)):
            yield event({"type": kind, "sequence_number": number, **data}, kind)

    def _events(self, asked: ModelRequest, reply: ModelReply) -> Iterator[tuple[str, dict[str, Any]]]:
        opening = {**_head(asked, reply), "status": "in_progress", "output": [], "usage": None}
        yield "response.created", {"response": opening}
        yield "response.in_progress", {"response": opening}
        for place, item in enumerate(_items(asked, reply)):
            yield from _item_events(place, item)
        answer = self.answer(asked, reply)
        yield f"response.{answer['status']}", {"response": answer}

    error = ChatCompletions.error


def _messages(items: list[dict[str, Any]], skipped: list[str]) -> list[Message]:
    """One message each, but the parts of one answer (thoughts, text, calls) make one message together. The types of
    items that are passed over are added to `skipped`."""
    messages: list[Message] = []
    answer: Message | None = None
    for place, item in enumerate(items):
        where = f"input[{place}]"
        kind = item.get("type", "message")
        if kind in ("reasoning", ADDITIONAL_TOOLS):
            continue
        if kind in ("function_call", "custom_tool_call"):
            answer = _with_call(messages, answer, read_call(item, where))
            continue
        answer = None
        if kind == "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise HttpRefusal(422, "invalid", f"{where}: role is not one of {', '.join(_ROLES)}")
            messages.append(Message(role, text_of(item.get("content"), where, _TEXTS)))
            answer = messages[-1] if role == "assistant" else None
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = text_of(item.get("output"), where, _TEXTS)
            messages.append(Message("tool", output, tool_call_id=str(item.get("call_id"))))
        elif _SERVER_ITEMS.fullmatch(str(kind)):
            skipped.append(str(kind))
        else:
            raise refuse(f"{where}: an item of type {kind!r} is not supported")
    return messages


def _with_call(messages: list[Message], answer: Message | None, call: ToolCall) -> Message:
    """Adds the call to the answer that it is a part of."""
    if answer is None:
        messages.append(Message("assistant", "", tool_calls=(call,)))
    else:
        messages[-1] = msgspec.structs.replace(answer, tool_calls=(*answer.tool_calls, call))
    return messages[-1]


def _head(asked: ModelRequest, reply: ModelReply) -> dict[str, Any]:
    return {
        "id": f"{_PREFIX}{reply.name}",
        "object": "response",
        "created_at": reply.created,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions or None,
        "metadata": {},
        "model": asked.model,
        "parallel_tool_calls": True,
        "previous_response_id": None if asked.previous is None else f"{_PREFIX}{asked.previous}",
        "temperature": reply.sampling.temperature,
        "tool_choice": "auto",
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": False,
            }
            for tool in asked.tools
        ],
        "top_p": reply.sampling.top_p,
    }


def _items(asked: ModelRequest, reply: ModelReply) -> list[dict[str, Any]]:
    said = reply.message
    items: list[dict[str, Any]] = []
    if said.reasoning:
        thought = {"type": "reasoning_text", "text": said.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{reply.name}", "summary": [], "content": [thought]})
    if said.content or not said.tool_calls:
        logprobs = [token_logprob(each) for each in reply.tokens]
        text = {"type": "output_text", "text": said.content, "annotations": [], "logprobs": logprobs}
        items.append(
            {
                "type": "message",
                "id": f"msg_{reply.name}",
                "role": "assistant",
                "status": "completed",
                "content": [text],
            }
        )
    for place, call in enumerate(said.tool_calls):
        items.append(call_item(call, f"fc_{reply.name}-{place}", asked.origins))
    return items


def _item_events(place: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    at = {"item_id": item["id"], "output_index": place}
    if item["type"] == "message":
        part = item["content"][0]
        in_part = {**at, "content_index": 0}
        empty = {**item, "status": "in_progress", "content": []}
        yield "response.output_item.added", {"output_index": place, "item": empty}
        yield "response.content_part.added", {**in_part, "part": {**part, "text": ""}}
        yield "response.output_text.delta", {**in_part, "delta": part["text"], "logprobs": []}
        yield "response.output_text.done", {**in_part, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**in_part, "part": part}
    elif item["type"] == "function_call":
        empty = {**item, "status": "in_progress", "arguments": ""}
        yield "response.output_item.added", {"output_index": place, "item": empty}
        yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
        done = {**at, "name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", done
    elif item["type"] == "custom_tool_call":
        yield "response.output_item.added", {"output_index": place, "item": {**item, "input": ""}}
        yield "response.custom_tool_call_input.delta", {**at, "delta": item["input"]}
        yield "response.custom_tool_call_input.done", {**at, "input": item["input"]}
    else:
        yield "response.output_item.added", {"output_index": place, "item": {**item, "content": []}}
        text = item["content"][0]["text"]
        yield "response.reasoning_text.delta", {**at, "content_index": 0, "delta": text}
        yield "response.reasoning_text.done", {**at, "content_index": 0, "text": text}
    yield "response.output_item.done", {"output_index": place, "item": item}
