"""The server's OpenAPI document, generated from the call records that the server decodes.

Arguments, bounds and result types come from the records, descriptions from the docstrings of the `Store` methods.
"""

from functools import cache
from inspect import getdoc
from typing import Any

import msgspec

from rollwright.store.api import Store
from rollwright.store.http.errors import ErrorBody
from rollwright.store.http.protocol import ACCEPTED, BATCH, FORMATS, MAX_BATCH

_ERRORS = {
    "400": "Malformed, or refused by the store.",
    "401": "The token is missing or wrong.",
    "403": "Sent by a web page to a server without a token.",
    "404": "No rollout, attempt or resource has that id.",
    "406": "The answer holds what JSON cannot carry; ask in msgpack.",
    "409": "The attempt does not hold the rollout any more, or the status cannot change that way.",
    "413": "The body is too large.",
    "415": "The body is neither JSON nor msgpack.",
    "422": "A field is missing, unknown, or of a wrong type.",
    "500": "The server failed.",
    "503": "The store gives no answer now; try again.",
}


@cache
def document() -> dict[str, Any]:
    replies = [kind.reply for kind in ACCEPTED.values()]
    types = [*ACCEPTED.values(), *replies, ErrorBody]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    found, components = _plain_pairs(list(schemas)), _plain_pairs(components)
    arguments = dict(zip(ACCEPTED, found, strict=False))
    returned = dict(zip(ACCEPTED, found[len(ACCEPTED) :], strict=False))
    error = found[-1]
    paths = {
        f"/v1/{name}": {"post": _operation(name, _summary(name), arguments[name], returned[name], error)}
        for name in ACCEPTED
    }
    paths[f"/v1/{BATCH}"] = {
        "post": _operation(
            BATCH,
            "Several calls that do not wait, in one request.",
            _entries(),
            _outcomes(error),
            error,
        )
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "rollwright store", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _plain_pairs(schema: Any) -> Any:
    """Pairs as arrays of two equal items: the same meaning, for tools that do not know `prefixItems`."""
    if isinstance(schema, list):
        return [_plain_pairs(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "prefixItems" in schema:
        first = schema["prefixItems"][0]
        schema = {name: value for name, value in schema.items() if name != "prefixItems"} | {"items": first}
    return {name: _plain_pairs(value) for name, value in schema.items()}


def _summary(name: str) -> str:
    """The first paragraph of the docstring of the call's method, or of a record that has no method."""
    method = getattr(Store, name, None)
    text = getdoc(ACCEPTED[name] if method is None else method) or ""
    return " ".join(text.split("\n\n")[0].split())


def _operation(name: str, summary: str, body: Any, result: Any, error: Any) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": _content(body)},
        "responses": {
            "200": {"description": "The answer.", "content": _content(result)},
            **{status: {"description": text, "content": _content(error)} for status, text in _ERRORS.items()},
        },
    }


def _content(schema: Any) -> dict[str, Any]:
    return {media_type: {"schema": schema} for media_type in FORMATS}


def _entries() -> dict[str, Any]:
    """Loose, because a wrong entry fails alone, in its outcome, and not the batch."""
    entry = {
        "type": "object",
        "properties": {
            "call": {"type": "string", "description": "The last part of the call's own path."},
            "arguments": {"description": "What would be the body there."},
        },
        "required": ["call", "arguments"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": entry, "maxItems": MAX_BATCH}


def _outcomes(error: Any) -> dict[str, Any]:
    either = [
        {
            "type": "object",
            "properties": {"answer": {}},
            "required": ["answer"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"refusal": error},
            "required": ["refusal"],
            "additionalProperties": False,
        },
    ]
    return {"type": "array", "items": {"oneOf": either}}
