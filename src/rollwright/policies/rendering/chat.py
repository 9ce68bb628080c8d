"""Messages, tools and calls in the shape that chat templates and the `renderers` package expect."""

import json
from collections.abc import Sequence
from typing import Any

from rollwright.policies.base import ToolSpec
from rollwright.trajectory import Message

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
