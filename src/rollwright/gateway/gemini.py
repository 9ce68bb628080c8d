"""Gemini's contents: `POST /v1beta/models/MODEL:generateContent`, and `:streamGenerateContent` and `:countTokens`.

The model and the way of streaming stand in the address, so an object of this format belongs to one address. Field names are
accepted in both spellings of the API, `functionCall` and `function_call`. A function's answer without an id belongs to the
earliest call of that name that has none yet.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import msgspec

from rollwright.engines.base import OutputFormat, ToolSpec
from rollwright.engines.constraints import json_object, json_schema, or_call
from rollwright.gateway.types import (
    ModelReply,
    ModelRequest,
    Wishes,
    check_messages,
    choose_tools,
    decode,
    event,
    passed_over,
    present_object_arguments,
    read_arguments,
    refuse,
    tool_call,
)
from rollwright.store.http.errors import HttpRefusal
from rollwright.trajectory import FinishReason, Message, ToolCall

GENERATE, STREAM, COUNT = "generateContent", "streamGenerateContent", "countTokens"
METHODS = (GENERATE, STREAM, COUNT)

MAX_CANDIDATES = 8
"""Answers to one request, as in the hosted API."""

_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    410: "FAILED_PRECONDITION",
    413: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}

_SAMPLING = {"topK": (None, 0, -1), "presencePenalty": (None, 0), "frequencyPenalty": (None, 0)}
"""Settings that change the distribution, and their neutral values."""

_IMAGES = ("inlineData", "fileData")
_MODEL_ROLES, _USER_ROLES = ("model", "assistant"), ("user", "function", "tool")

_DECODER = msgspec.json.Decoder(dict[str, Any])


def is_gemini_version(name: str) -> bool:
    """Whether a part of an address is a version of this API, apart from `v1`, which is also that of others."""
    return name in ("v1beta", "v1alpha", "v1beta1")


def read_address(tail: tuple[str, ...]) -> tuple[str, str] | None:
    """The model and the method of an address behind the version; `None`: it is not one of this API."""
    if len(tail) < 2 or tail[0] != "models":
        return None
    name, colon, method = unquote("/".join(tail[1:])).rpartition(":")
    return (name, method) if colon and method in METHODS else None


@dataclass(frozen=True)
class GeminiContents:
    """The API at one address."""

    model: str = ""
    stream: bool = False
    as_list: bool = False
    """Whether a stream is a JSON array instead of server-sent events."""

    def read(self, body: bytes) -> ModelRequest:
        return self._read(decode(_DECODER, body))

    def read_to_count(self, body: bytes) -> ModelRequest:
        request = decode(_DECODER, body)
        whole = _field(request, "generateContentRequest")
        return self._read(whole if isinstance(whole, dict) else request)

    def answer_count(self, tokens: int) -> Mapping[str, Any]:
        return {"totalTokens": tokens, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": tokens}]}

    def present(self, asked: ModelRequest, message: Message) -> Message:
        return present_object_arguments(message)

    def answer(self, asked: ModelRequest, reply: ModelReply) -> Any:
        candidates = [
            _candidate(asked, each, place, _parts(each.message), finished=True)
            for place, each in enumerate(reply.all)
        ]
        told = {"candidates": candidates, **_about(asked, reply), "usageMetadata": _usage(reply)}
        return [told] if self.as_list else told

    def events(self, asked: ModelRequest, reply: ModelReply) -> Iterator[bytes]:
        for place, each in enumerate(reply.all):
            *before, last = _parts(each.message)
            for part in before:
                told = _candidate(asked, each, place, [part], finished=False)
                yield event({"candidates": [told], **_about(asked, reply)})
            told = _candidate(asked, each, place, [last], finished=True)
            yield event({"candidates": [told], **_about(asked, reply), "usageMetadata": _usage(reply)})

    def error(self, status: int, kind: str, message: str) -> Mapping[str, Any]:
        default = "INVALID_ARGUMENT" if status < 500 else "INTERNAL"
        return {
            "error": {
                "code": status,
                "message": message,
                "status": _STATUSES.get(status, default),
                "details": [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": kind}],
            }
        }

    def _read(self, request: Mapping[str, Any]) -> ModelRequest:
        config = _mapping(_field(request, "generationConfig"), "generationConfig")
        messages: list[Message] = []
        if system := _text(_field(request, "systemInstruction"), "systemInstruction"):
            messages.append(Message("system", system))
        messages.extend(_read_contents(_field(request, "contents")))
        specs, theirs = _read_tools(_field(request, "tools"))
        tools, forced = choose_tools(specs, _tool_choice(_field(request, "toolConfig")))
        candidates = _whole_number(config, "candidateCount", 1, MAX_CANDIDATES)
        return ModelRequest(
            messages=check_messages(messages),
            model=self.model,
            tools=tools,
            wishes=Wishes(
                _number(config, "temperature", 0.0, None),
                _number(config, "topP", 0.0, 1.0),
                _whole_number(config, "maxOutputTokens", 1, None),
                _texts(_field(config, "stopSequences"), "generationConfig.stopSequences"),
                tuple(name for name, neutral in _SAMPLING.items() if _field(config, name) not in neutral),
            ),
            stream=self.stream,
            output=forced or _output_format(config, tools),
            choices=candidates or 1,
            logprobs=bool(_field(config, "responseLogprobs")),
            notes=passed_over(theirs),
        )


@lru_cache(maxsize=64)
def _snake(name: str) -> str:
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in name)


def _field(given: Mapping[str, Any], name: str) -> Any:
    return given[name] if name in given else given.get(_snake(name))


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise HttpRefusal(422, "invalid", f"{where}: expected an object")
    return value


def _number(config: Mapping[str, Any], name: str, least: float, most: float | None) -> float | None:
    value = _field(config, name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value < least or (most is not None and value > most):
        raise HttpRefusal(
            422, "invalid", f"generationConfig.{name}: expected a number from {least:g} on, got {value!r}"
        )
    return float(value)


def _whole_number(config: Mapping[str, Any], name: str, least: int, most: int | None) -> int | None:
    value = _field(config, name)
    if value is None:
        return None
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        upper = "" if most is None else f" to {most}"
        raise HttpRefusal(
            422,
            "invalid",
            f"generationConfig.{name}: expected a whole number from {least}{upper}, got {value!r}",
        )
    return int(value)


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise HttpRefusal(422, "invalid", f"{where}: expected a list of texts")
    return tuple(value)


def _read_contents(contents: Any) -> list[Message]:
    given = [contents] if isinstance(contents, dict | str) else contents
    if not isinstance(given, list):
        raise HttpRefusal(422, "invalid", "contents: expected a list of contents")
    messages: list[Message] = []
    waiting: list[ToolCall] = []
    """Calls of the model that have no answer yet."""
    for place, each in enumerate(given):
        where = f"contents[{place}]"
        content = {"parts": [{"text": each}]} if isinstance(each, str) else _mapping(each, where)
        role = _field(content, "role") or "user"
        if role in _MODEL_ROLES:
            said = _read_answer(content, where, len(messages))
            waiting += said.tool_calls
            if messages and messages[-1].role == "assistant":
                said = _joined(messages.pop(), said)  # parts of one answer, as they were streamed
            messages.append(said)
        elif role in _USER_ROLES:
            messages.extend(_read_question(content, where, waiting))
        elif role == "system":
            messages.append(Message("system", _text(content, where)))
        else:
            raise HttpRefusal(422, "invalid", f"{where}.role: expected user or model, got {role!r}")
    return messages


def _read_answer(content: Mapping[str, Any], where: str, place: int) -> Message:
    texts: list[str] = []
    calls: list[ToolCall] = []
    for part in _parts_of(content, where):
        call = _field(part, "functionCall")
        if isinstance(call, dict):
            # An id is needed to match answers; clients of the older API have none.
            name = call.get("id") or f"call_{place}_{len(calls)}"
            calls.append(tool_call(name, call.get("name"), call.get("args") or {}, where))
        elif not part.get("thought"):
            texts.append(_part_text(part, where))
    return Message("assistant", "".join(texts), tool_calls=tuple(calls))


def _joined(first: Message, second: Message) -> Message:
    calls = (*first.tool_calls, *second.tool_calls)
    return Message("assistant", first.content + second.content, tool_calls=calls)


def _read_question(content: Mapping[str, Any], where: str, waiting: list[ToolCall]) -> Iterator[Message]:
    """One message for each function's answer, and one for the rest."""
    texts = []
    for part in _parts_of(content, where):
        told = _field(part, "functionResponse")
        if isinstance(told, dict):
            name = told.get("name")
            found = _answered_call(told.get("id"), name, waiting)
            yield Message(
                "tool",
                _response_text(told.get("response")),
                tool_call_id=found,
                name=name if isinstance(name, str) else None,
            )
        else:
            texts.append(_part_text(part, where))
    if texts:
        yield Message("user", "\n".join(texts))


def _answered_call(given: Any, name: Any, waiting: list[ToolCall]) -> str:
    for call in waiting:
        if (given is None and call.name == name) or (given is not None and call.id == given):
            waiting.remove(call)
            return call.id
    return str(given if given is not None else name)


def _response_text(response: Any) -> str:
    """What a function answered: the text under one of the usual names, else its JSON."""
    if isinstance(response, dict) and len(response) == 1:
        (key, value), *_ = response.items()
        if key in ("output", "result", "content", "error") and isinstance(value, str):
            return value
    return msgspec.json.encode(response if response is not None else {}).decode()


def _parts_of(content: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    parts = content.get("parts") or []
    if isinstance(parts, dict | str):
        parts = [parts]
    if not isinstance(parts, list):
        raise HttpRefusal(422, "invalid", f"{where}.parts: expected a list of parts")
    return [{"text": each} if isinstance(each, str) else _mapping(each, f"{where}.parts") for each in parts]


def _part_text(part: Mapping[str, Any], where: str) -> str:
    text = part.get("text")
    if isinstance(text, str):
        return text
    if any(_field(part, each) is not None for each in _IMAGES):
        raise HttpRefusal(
            400, "images", f"{where}: images and files are not supported: the policy reads text alone"
        )
    kinds = ", ".join(sorted(part))[:80] or "nothing"
    raise refuse(
        f"{where}: a part with {kinds} is not supported; accepted: text, functionCall, functionResponse"
    )


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part_text(part, where) for part in _parts_of(_mapping(content, where), where))


def _read_tools(given: Any) -> tuple[list[ToolSpec], list[str]]:
    """The functions, and the kinds of tools that the provider would run itself."""
    specs, theirs = [], []
    for place, each in enumerate(given if isinstance(given, list) else [] if given is None else [given]):
        tool = _mapping(each, f"tools[{place}]")
        declared = _field(tool, "functionDeclarations")
        for function in declared if isinstance(declared, list) else ():
            specs.append(_spec(_mapping(function, f"tools[{place}].functionDeclarations")))
        theirs += [key for key in tool if key not in ("functionDeclarations", "function_declarations")]
    return specs, theirs


def _spec(function: Mapping[str, Any]) -> ToolSpec:
    name, described = function.get("name"), function.get("description") or ""
    if not isinstance(name, str) or not name:
        raise HttpRefusal(422, "invalid", "functionDeclarations: a function needs a name")
    schema = _field(function, "parametersJsonSchema")
    if schema is None and function.get("parameters") is not None:
        schema = _json_schema(function["parameters"])
    return ToolSpec(name, str(described)) if schema is None else ToolSpec(name, str(described), schema)


def _json_schema(schema: Any) -> Any:
    """A schema of this API, which writes types in capitals, as a JSON schema."""
    if isinstance(schema, list):
        return [_json_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "type" and isinstance(value, str):
            made[key] = value.lower()
        elif key == "properties" and isinstance(value, dict):
            made[key] = {name: _json_schema(each) for name, each in value.items()}
        elif key in ("items", "anyOf", "any_of", "prefixItems"):
            made["anyOf" if key == "any_of" else key] = _json_schema(value)
        elif key not in ("nullable", "propertyOrdering", "property_ordering"):
            made[key] = value
    if schema.get("nullable") and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    return made


def _tool_choice(config: Any) -> Any:
    """The tool choice in the words that `choose_tools` knows."""
    calling = _mapping(
        _field(_mapping(config, "toolConfig"), "functionCallingConfig"), "functionCallingConfig"
    )
    names = _texts(_field(calling, "allowedFunctionNames"), "allowedFunctionNames")
    match str(calling.get("mode") or "AUTO").upper():
        case "AUTO" | "VALIDATED" | "MODE_UNSPECIFIED":
            return None
        case "NONE":
            return "none"
        case "ANY" if names:
            allowed = [{"type": "function", "name": each} for each in names]
            return {"type": "allowed_tools", "mode": "required", "tools": allowed}
        case "ANY":
            return "required"
        case other:
            raise refuse(
                f"functionCallingConfig.mode: {other[:80]} is not supported; accepted: AUTO, ANY, NONE"
            )


def _output_format(config: Mapping[str, Any], tools: Sequence[ToolSpec]) -> OutputFormat | None:
    kind = _field(config, "responseMimeType")
    schema = _field(config, "responseJsonSchema")
    if schema is None and (given := _field(config, "responseSchema")) is not None:
        schema = _json_schema(given)
    if kind in (None, "text/plain"):
        return None
    if kind != "application/json":
        raise refuse(f"responseMimeType: {str(kind)[:80]} is not supported; accepted: application/json")
    if schema is None:
        return or_call(json_object(), tools)
    if not isinstance(schema, dict):
        raise HttpRefusal(422, "invalid", "responseSchema: expected an object")
    return or_call(json_schema(schema, ""), tools)


def _parts(said: Message) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if said.reasoning:
        parts.append({"text": said.reasoning, "thought": True})
    if said.content or not said.tool_calls:
        parts.append({"text": said.content})
    for call in said.tool_calls:
        parts.append({"functionCall": {"id": call.id, "name": call.name, "args": read_arguments(call)}})
    return parts


def _candidate(
    asked: ModelRequest, reply: ModelReply, place: int, parts: list[dict[str, Any]], *, finished: bool
) -> dict[str, Any]:
    told: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": place}
    if not finished:
        return told
    told["finishReason"] = "STOP" if reply.finish is FinishReason.STOP else "MAX_TOKENS"
    if asked.logprobs:
        chosen = [{"token": each.text, "logProbability": each.logprob} for each in reply.tokens]
        told["logprobsResult"] = {
            "chosenCandidates": chosen,
            "topCandidates": [{"candidates": [each]} for each in chosen],
        }
    return told


def _about(asked: ModelRequest, reply: ModelReply) -> dict[str, str]:
    return {"modelVersion": asked.model, "responseId": reply.name}


def _usage(reply: ModelReply) -> dict[str, int]:
    made = sum(each.completion_tokens for each in reply.all)
    return {
        "promptTokenCount": reply.prompt_tokens,
        "candidatesTokenCount": made,
        "totalTokenCount": reply.prompt_tokens + made,
    }


def model_card(name: str) -> dict[str, Any]:
    """A model in the words of this API; any name is the policy."""
    return {
        "name": f"models/{name.removeprefix('models/')}",
        "displayName": name,
        "supportedGenerationMethods": list(METHODS),
    }


def model_cards(names: Iterable[str]) -> dict[str, Any]:
    return {"models": [model_card(each) for each in names]}
