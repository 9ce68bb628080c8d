"""Messages, tools and calls in the shape that chat templates and the `renderers` package expect.

What the `renderers` package has read from a completion, as `Parsed`.
"""

import json
from collections.abc import Container, Sequence
from typing import Any

from rollwright.engines.base import Parsed, ToolSpec
from rollwright.rng import digest
from rollwright.trajectory import Message, TokenIds, ToolCall

ChatMessage = dict[str, Any]


def chat(messages: Sequence[Message], *, read_arguments: bool) -> list[ChatMessage]:
    """`read_arguments`: templates that walk over a call's arguments need them as an object, not as text."""
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
    """`None` without tools: an empty list makes some formats announce that there are tools."""
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
    """An object where the text is one; what the model wrote where it is not."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


READABLE = ("ok", "unknown_tool")
"""A call of a tool that does not exist can be read; telling the model so is the agent's task."""

CALL_ID_LENGTH = 9
"""Letters and digits of a made-up call id: some chat templates accept this length alone."""

_ARGUMENT_KEYS = ('"arguments"', '"parameters"')
"""Under which key the formats that write a call as JSON have its arguments."""


def last_turn(prompt: TokenIds, stop_ids: Container[int]) -> TokenIds:
    """The prompt from its last end-of-turn id on; all of it where there is none."""
    place = len(prompt) - 1
    while place > 0 and prompt[place] not in stop_ids:
        place -= 1
    return prompt[max(place, 0) :]


def as_parsed(made: Any, prompt: TokenIds, sampled: TokenIds) -> Parsed:
    """`made` is the package's `ParsedResponse`."""
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
    """The same for the same turn in any process; along one sequence no prompt is as long as an earlier one."""
    return f"{digest('tool call', len(prompt), sampled.tobytes().hex(), place):016x}"[:CALL_ID_LENGTH]


def _written(raw: str, arguments: Any) -> str:
    """The arguments as the model wrote them where its format is JSON, else the object that was read, as JSON."""
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
