"""Output formats: forced tool calls and JSON as one JSON schema for the whole text of a completion.

Always true: a completion that ended by itself under a constraint is JSON that the schema accepts, whichever engine made it:
vLLM, SGLang and llama.cpp constrain by their own grammar backends, a model in this process by `llguidance`, a player by
construction. A forced tool call is the object `{"name": …, "arguments": …}` and nothing else, for every model family: the
formats of families differ, and engines enforce a schema from the first token on.

What it means for training: a constrained token is drawn from the distribution over the tokens that the format allows, and
its log-probability is that of this distribution. A trainer computes the distribution over all tokens; the two differ by
the mass of the forbidden ones, which is not recorded. So the turn records the constraint (`SamplingParams.constraint`) and
is left out of the loss and counted, as any other sampling that is not modelled. Turns without a constraint in the same
rollout are trained as usual.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from rollwright.engines.base import OutputFormat, Parsed, ToolSpec
from rollwright.trajectory import ToolCall

_encode = msgspec.json.Encoder().encode


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A forced tool call as the model writes it."""

    name: str
    arguments: msgspec.Raw


_decode = msgspec.json.Decoder(_Call).decode


def json_object() -> OutputFormat:
    """Any JSON object."""
    return OutputFormat("json_object", {"type": "object"})


def json_schema(schema: dict[str, Any], name: str = "") -> OutputFormat:
    """JSON that a schema accepts."""
    return OutputFormat("json_schema", schema, name or "answer")


def forced_call(tools: Sequence[ToolSpec]) -> OutputFormat:
    """One call of one of these tools, with arguments that its parameters' schema accepts."""
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool, f"tool{place}", definitions) for place, tool in enumerate(tools)]
    schema: dict[str, Any] = dict(calls[0]) if len(calls) == 1 else {"anyOf": calls}
    if definitions:
        schema["$defs"] = definitions
    return OutputFormat("tool_call", schema, "tool_call", tuple(tool.name for tool in tools))


def or_call(output: OutputFormat, tools: Sequence[ToolSpec]) -> OutputFormat:
    """The JSON format, or one call of one of these tools: a format is meant for the answer, not for the calls before it."""
    if not tools:
        return output
    definitions: dict[str, Any] = {}
    answer = _hoist(output.schema, "answer", definitions)
    calls = [_call_schema(tool, f"tool{place}", definitions) for place, tool in enumerate(tools)]
    schema: dict[str, Any] = {"anyOf": [answer, *calls]}
    if definitions:
        schema["$defs"] = definitions
    names = tuple(tool.name for tool in tools)
    return OutputFormat(output.kind, schema, output.name, names, answer=output.schema)


def read_output(text: str, output: OutputFormat, call_id: str) -> Parsed:
    """A completion under a format. A forced call that was cut off by the token limit is returned as text."""
    if not output.tools:
        return Parsed(text)
    try:
        made = _decode(text.encode())
    except (msgspec.MsgspecError, RecursionError):
        return Parsed("", malformed=(text,)) if output.kind == "tool_call" else Parsed(text)
    if made.name not in output.tools:
        return Parsed(text)
    return Parsed("", tool_calls=(ToolCall(call_id, made.name, bytes(made.arguments).decode()),))


def chat_fields(output: OutputFormat) -> dict[str, Any]:
    """The constraint in the words of OpenAI's chat completions, for a server that has the tools as well."""
    if output.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if output.kind == "json_schema":
        plain = OutputFormat(output.kind, output.answer or output.schema, output.name)
        return {"response_format": response_format(plain)}
    if len(output.tools) > 1:
        return {"tool_choice": "required"}
    return {"tool_choice": {"type": "function", "function": {"name": output.tools[0]}}}


def response_format(output: OutputFormat) -> dict[str, Any]:
    """The schema as a `response_format`."""
    schema = {"name": output.name or "answer", "schema": output.schema}
    return {"type": "json_schema", "json_schema": schema}


def _call_schema(tool: ToolSpec, key: str, definitions: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.name},
            "arguments": {"type": "object", **_hoist(tool.parameters, key, definitions)},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _hoist(schema: dict[str, Any], key: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema without its own definitions, which move to `definitions` under names that begin with `key`: references
    are relative to the root, and the root is another one now."""
    names: dict[str, str] = {}
    for group in ("$defs", "definitions"):
        names |= {f"#/{group}/{name}": f"{key}_{name}" for name in _object(schema.get(group))}
    whole = {name: each for name, each in schema.items() if name not in ("$defs", "definitions", "$schema")}
    if _refers_to_root(schema):
        names["#"] = key
        definitions[key] = _moved(whole, names)
    for group in ("$defs", "definitions"):
        for name, each in _object(schema.get(group)).items():
            definitions[f"{key}_{name}"] = _moved(each, names)
    return _object(_moved(whole, names))


def _moved(value: Any, names: dict[str, str]) -> Any:
    """The value with its references renamed."""
    if isinstance(value, list):
        return [_moved(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _moved_reference(each, names)
        if name == "$ref" and isinstance(each, str)
        else _moved(each, names)
        for name, each in value.items()
    }


def _moved_reference(reference: str, names: dict[str, str]) -> str:
    if reference == "#":
        return f"#/$defs/{names['#']}"
    for old, new in names.items():
        if old != "#" and (reference == old or reference.startswith(f"{old}/")):
            return f"#/$defs/{new}{reference[len(old) :]}"
    return reference


def _refers_to_root(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_refers_to_root, value))
    if not isinstance(value, dict):
        return False
    return value.get("$ref") == "#" or any(map(_refers_to_root, value.values()))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
