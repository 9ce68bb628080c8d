"""Items of OpenAI's Responses, as NeMo-Gym's rows and verifiers have them, from and to messages of chat completions. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any


def chat_messages(wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation that a row begins with."""
    found: list[dict[str, Any]] = []
    if wanted.get("instructions"):
        found.append({"role": "system", "content": wanted["instructions"]})
    asked = wanted["input"]
    if isinstance(asked, str):
        return [*found, {"role": "user", "content": asked}]
    for item in asked:
        kind = item.get("type") or "message"
        if kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if found and found[-1]["role"] == "assistant":
                found[-1].setdefault("tool_calls", []).append(call)
            else:
                found.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            found.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            found.append({"role": role, "content": _text(item["content"])})
    return found


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content)


def chat_tools(wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The functions that a row offers."""
    return [
        {
            "type": "function",
            "function": {
                "name": each["name"],
                "description": each.get("description") or "",
                "parameters": each.get("parameters") or {"type": "object", "properties": {}},
            },
        }
        for each in wanted.get("tools") or ()
        if each.get("type") == "function"
    ]


def message_item(said: Mapping[str, Any], number: int, *, complete: bool) -> list[dict[str, Any]]:
    """The text of an answer; none for an answer that only calls functions."""
    if not said.get("content") and said.get("tool_calls"):
        return []
    part: dict[str, Any] = {"type": "output_text", "text": said.get("content") or "", "annotations": []}
    return [
        {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "status": "completed" if complete else "incomplete",
            "content": [part],
        }
    ]


def call_item(call: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": call["id"],
        "call_id": call["id"],
        "type": "function_call",
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
        "status": "completed",
    }


def response_object(
    wanted: Mapping[str, Any], output: Sequence[Mapping[str, Any]], created: int, *, complete: bool
) -> dict[str, Any]:
    """The whole episode as one response."""
    return {
        "id": "resp_rollwright",
        "object": "response",
        "created_at": created,
        "model": "policy",
        "status": "completed" if complete else "incomplete",
        "error": None,
        "incomplete_details": None if complete else {"reason": "max_output_tokens"},
        "instructions": wanted.get("instructions"),
        "metadata": {},
        "output": list(output),
        "parallel_tool_calls": True,
        "temperature": wanted.get("temperature"),
        "tool_choice": "auto",
        "tools": [{**each, "strict": each.get("strict", True)} for each in wanted.get("tools") or ()],
        "top_p": wanted.get("top_p"),
        "usage": None,
    }
