"""Tools of OpenAI's responses API that are more than functions: namespaces of tools, and custom tools that take a text.

Always true: the model knows functions alone. A tool of a namespace is a function with the namespace in its name, and a
custom tool a function with one text, `input`; a call of one is told to the client as an item of the tool's own kind, and
the item that the client sends back is the same call again. A tool that is none of these is passed over.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollwright.engines.base import ToolSpec
from rollwright.gateway.types import ToolOrigin, tool_call
from rollwright.store.http.errors import HttpRefusal
from rollwright.trajectory import ToolCall

ADDITIONAL_TOOLS = "additional_tools"
"""Type of an item that declares tools in the conversation."""

_INPUT = "input"


class ResponseTool(msgspec.Struct):
    """A tool as a client declares it."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    """Of a custom tool's text."""
    tools: "list[ResponseTool] | None" = None
    """Of a namespace."""


class DeclaredTools(msgspec.Struct, frozen=True):
    """The tools of one request."""

    specs: tuple[ToolSpec, ...]
    origins: Mapping[str, ToolOrigin]
    """By the function's name; plain functions are not in it."""
    passed_over: tuple[str, ...]
    """Kinds of the tools that are not served."""


def additional_tools(items: str | Sequence[Mapping[str, Any]]) -> list[ResponseTool]:
    """The tools that items of the conversation declare. The model is told of them from the start of its prompt on."""
    found: list[ResponseTool] = []
    for place, item in enumerate(() if isinstance(items, str) else items):
        if item.get("type") == ADDITIONAL_TOOLS:
            try:
                found += msgspec.convert(item.get("tools"), list[ResponseTool])
            except msgspec.ValidationError as error:
                raise HttpRefusal(422, "invalid", f"input[{place}].tools: {error}") from None
    return found


def declare(tools: Sequence[ResponseTool]) -> DeclaredTools:
    specs: list[ToolSpec] = []
    origins: dict[str, ToolOrigin] = {}
    skipped: list[str] = []

    def add(tool: ResponseTool, namespace: ResponseTool | None) -> None:
        if tool.type == "namespace" and namespace is None:
            for each in tool.tools or ():
                add(each, tool)
            return
        if tool.type not in ("function", "custom"):
            skipped.append(tool.type)
            return
        origin = ToolOrigin(
            tool.name, None if namespace is None else namespace.name, custom=tool.type == "custom"
        )
        name = joined_name(tool.name, origin.namespace)
        if origin != ToolOrigin(tool.name):
            origins[name] = origin
        specs.append(_spec(tool, name, "" if namespace is None else namespace.description or ""))

    for each in tools:
        add(each, None)
    return DeclaredTools(tuple(specs), origins, tuple(skipped))


def joined_name(name: str, namespace: str | None) -> str:
    """Name of the function that stands for a tool of a namespace."""
    return f"{namespace}__{name}" if namespace else name


def _spec(tool: ResponseTool, name: str, about: str) -> ToolSpec:
    description = "\n".join(filter(None, (about, tool.description)))
    if tool.type == "custom":
        text = {"type": "string", "description": _describe_format(tool.format or {})}
        schema = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT]}
        return ToolSpec(name, description, schema)
    if tool.parameters is None:
        return ToolSpec(name, description)
    return ToolSpec(name, description, tool.parameters)


def _describe_format(format: Mapping[str, Any]) -> str:
    if format.get("type") != "grammar":
        return "Any text."
    return f"A text of this {format.get('syntax', 'lark')} grammar:\n{format.get('definition', '')}"


def flat_choice(choice: Any) -> Any:
    """A `tool_choice` in which every tool is named as the model's function is."""
    if not isinstance(choice, dict):
        return choice
    flat = dict(choice)
    if flat.get("type") == "custom":
        flat["type"] = "function"
    if isinstance(name := flat.get("name"), str):
        flat["name"] = joined_name(name, flat.get("namespace"))
    if isinstance(inner := flat.get("tools"), list):
        flat["tools"] = [flat_choice(each) for each in inner]
    return flat


def custom_input(arguments: str) -> str:
    """The text that a call of a custom tool gives; arguments that name none are the text."""
    try:
        given = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    text = given.get(_INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def present_call(call: ToolCall, origins: Mapping[str, ToolOrigin]) -> ToolCall:
    """The call as it comes back from the client: of a custom tool, only the text does."""
    origin = origins.get(call.name)
    if origin is None or not origin.custom:
        return call
    return msgspec.structs.replace(call, arguments=_arguments(custom_input(call.arguments)))


def call_item(call: ToolCall, id: str, origins: Mapping[str, ToolOrigin]) -> dict[str, Any]:
    """A call as an item of the answer."""
    origin = origins.get(call.name, ToolOrigin(call.name))
    item: dict[str, Any] = {
        "type": "custom_tool_call" if origin.custom else "function_call",
        "id": id,
        "call_id": call.id,
        "name": origin.name,
        "status": "completed",
    }
    if origin.custom:
        item["input"] = custom_input(call.arguments)
    else:
        item["arguments"] = call.arguments
    if origin.namespace is not None:
        item["namespace"] = origin.namespace
    return item


def read_call(item: Mapping[str, Any], where: str) -> ToolCall:
    """The call of an item that the client sends back."""
    name = item.get("name")
    if isinstance(name, str):
        name = joined_name(name, item.get("namespace"))
    if item.get("type") == "custom_tool_call":
        return tool_call(item.get("call_id"), name, _arguments(str(item.get("input", ""))), where)
    return tool_call(item.get("call_id"), name, item.get("arguments", ""), where)


def _arguments(text: str) -> str:
    return msgspec.json.encode({_INPUT: text}).decode()
