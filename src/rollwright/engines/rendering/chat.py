"""Conversions between our types and those of chat templates and the `renderers` package: messages, tools, parsed completions."""

import json
from collections.abc import Container, Sequence
from typing import Any

from rollwright.engines.base import Parsed, ToolSpec
from rollwright.rng import digest
from rollwright.trajectory import Message, TokenIds, ToolCall

ChatMessage = dict[str, Any]


def chat(messages: Sequence[Message], *, read_arguments: bool) -> list[ChatMessage]:
    """Messages as dicts. `read_arguments`: pass call arguments as an object, because templates iterate over them."""
    return [_chat_message(message, read_arguments) for message in messages]


def _chat_message(message: Message, read_arguments: bool) -> ChatMessage:
    made: ChatMessage = {"role": message.role, "content": message.content}
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            tool_call(call.id, call.name, _arguments(call.arguments) if read_arguments else call.arguments)
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        made["name"] = message.name
    return made


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def tool_specs(tools: Sequence[ToolSpec]) -> list[dict[str, Any]] | None:
    """Tools as dicts; `None` without tools, because an empty list makes some formats announce tools."""
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in tools
    ]


def _arguments(text: str) -> Any:
    """The arguments as an object if the text is one, else the text that the model wrote."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


READABLE = ("ok", "unknown_tool")
"""Statuses of well-formed calls. A call of an unknown tool is one: telling the model so is the agent's task."""

CALL_ID_LENGTH = 9
"""Characters of a generated call id: some chat templates accept no other length."""

_ARGUMENT_KEYS = ('"arguments"', '"parameters"')
"""Keys of the arguments in formats that write a call as JSON."""


def last_turn(prompt: TokenIds, stop_ids: Container[int]) -> TokenIds:
    """The prompt from its last end-of-turn id on; the whole prompt if there is none."""
    place = len(prompt) - 1
    while place > 0 and prompt[place] not in stop_ids:
        place -= 1
    return prompt[max(place, 0) :]


def as_parsed(made: Any, prompt: TokenIds, sampled: TokenIds) -> Parsed:
    """Convert the package's `ParsedResponse`."""
    calls, malformed = [], []
    for place, call in enumerate(made.tool_calls):
        if call.status in READABLE and call.name:
            call_id = call.id or _call_id(prompt, sampled, place)
            calls.append(ToolCall(id=call_id, name=call.name, arguments=_written(call.raw, call.arguments)))
        else:
            malformed.append(call.raw)
    return Parsed(
        content=made.content,
        reasoning=made.reasoning_content or "",
        tool_calls=tuple(calls),
        malformed=tuple(malformed),
    )


def _call_id(prompt: TokenIds, sampled: TokenIds, place: int) -> str:
    """An id that is the same for the same turn in any process, and unique in a sequence because prompts only grow."""
    return f"{digest('tool call', len(prompt), sampled.tobytes().hex(), place):016x}"[:CALL_ID_LENGTH]


def _written(raw: str, arguments: Any) -> str:
    """The arguments as the model wrote them if its format is JSON, else the parsed object as JSON."""
    if isinstance(arguments, str):
        return arguments
    for key in _ARGUMENT_KEYS:
        start = raw.find("{", raw.find(key) + len(key)) if key in raw else -1
        if start < 0:
            continue
        try:
            value, end = json.JSONDecoder().raw_decode(raw, start)
        except ValueError:
            continue
        if value == arguments:
            return raw[start:end]
    return json.dumps(arguments or {}, ensure_ascii=False)
