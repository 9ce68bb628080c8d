"""Instances of JSON schemas, for players without a model: what they write under an output format.

Always true: the value is made from the schema and the draws of one key alone, so the same call gives the same value; it is
small; a schema that refers to itself ends, because optional parts are left out below a depth. Keywords that only a search
could satisfy (`not`, `if`) are not looked at.
"""

import re
import string
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from rollwright.rng import KeyPart, generator

MAX_DEPTH = 6
"""Depth below which optional properties and items are left out."""

_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "harbor")

_FORMATS = {
    "date": "2024-05-17",
    "date-time": "2024-05-17T12:00:00Z",
    "time": "12:00:00Z",
    "duration": "P1D",
    "email": "agent@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/",
    "uuid": "5f0c1c1e-2f6a-4b7e-9a37-0c0f5b1d2e3f",
}

_ANY = {"type": "object"}


def instance(schema: Any, *key: KeyPart) -> Any:
    """A value that the schema accepts."""
    return _Maker(schema, generator(*key, "instance")).make(schema, 0)


class _Maker:
    def __init__(self, root: Any, draws: Random) -> None:
        self._root = root
        self._draws = draws

    def make(self, schema: Any, depth: int) -> Any:
        schema = self._resolved(schema, 0)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return self._draws.choice(schema["enum"])
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            rest = {name: each for name, each in schema.items() if name not in ("anyOf", "oneOf")}
            # Deep down the simplest choice ends a schema that refers to itself.
            chosen = min(choices, key=_size) if depth > MAX_DEPTH else self._draws.choice(choices)
            return self.make(_merged(rest, self._resolved(chosen, 0)), depth)
        kind = schema.get("type") or _kind_of(schema)
        if isinstance(kind, list):
            kind = kind[0] if depth > MAX_DEPTH else self._draws.choice(kind)
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return self._number(schema, whole=kind == "integer")
            case "boolean":
                return self._draws.random() < 0.5
            case _:
                return None

    def _resolved(self, schema: Any, hops: int) -> dict[str, Any]:
        """The schema with its reference followed and its `allOf` merged."""
        if not isinstance(schema, Mapping):
            return dict(_ANY)
        found = dict(schema)
        reference = found.pop("$ref", None)
        if isinstance(reference, str) and hops < MAX_DEPTH:
            found = _merged(found, self._resolved(_look_up(self._root, reference), hops + 1))
        for part in found.pop("allOf", ()):
            found = _merged(found, self._resolved(part, hops + 1))
        return found

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties") or {}
        required = list(schema.get("required") or ())
        names = [each for each in properties if each in required or depth <= 2]
        names += [each for each in required if each not in properties]
        free = schema.get("additionalProperties")
        for number in range(schema.get("minProperties", 0) - len(names)):
            names.append(f"key{number}")
        return {name: self.make(properties.get(name, free), depth + 1) for name in names}

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        fixed = schema.get("prefixItems") or ()
        least = schema.get("minItems", 0)
        most = schema.get("maxItems", max(least, 2))
        items = schema.get("items", {"type": "string"})
        count = least if depth > MAX_DEPTH else self._draws.randint(least, max(least, min(most, least + 2)))
        made = [self.make(each, depth + 1) for each in fixed]
        while len(made) < count and items is not False:
            value = self.make(items, depth + 1)
            made.append(f"{value}{len(made)}" if isinstance(value, str) and _is_free(items) else value)
        return made

    def _string(self, schema: Mapping[str, Any]) -> str:
        if schema.get("format") in _FORMATS:
            return _FORMATS[schema["format"]]
        if "pattern" in schema:
            return _matching(schema["pattern"], self._draws)
        text = self._draws.choice(_WORDS)
        least = schema.get("minLength", 0)
        while len(text) < least:
            text += " " + self._draws.choice(_WORDS)
        return text[: max(least, schema.get("maxLength", len(text)))]

    def _number(self, schema: Mapping[str, Any], *, whole: bool) -> int | float:
        low, high = schema.get("minimum"), schema.get("maximum")
        if isinstance(above := schema.get("exclusiveMinimum"), int | float):
            low = above + (1 if whole else 1e-6)
        if isinstance(below := schema.get("exclusiveMaximum"), int | float):
            high = below - (1 if whole else 1e-6)
        if low is None:
            low = 0 if high is None or high >= 0 else high - 100
        if high is None:
            high = low + 100
        step = schema.get("multipleOf")
        if step:
            least = -(-low // step)
            multiple: int | float = self._draws.randint(int(least), max(int(least), int(high // step))) * step
            return multiple
        if whole:
            return self._draws.randint(int(-(-low // 1)), int(high // 1))
        return round(self._draws.uniform(low, high), 3) if high - low > 0.01 else low


def _look_up(root: Any, reference: str) -> Any:
    found = root
    for part in reference.lstrip("#").strip("/").split("/"):
        if part and isinstance(found, Mapping):
            found = found.get(part.replace("~1", "/").replace("~0", "~"))
    return found


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Both schemas at once, as far as players need it."""
    both = {**second, **first}
    for name in ("properties", "$defs"):
        if name in first and name in second:
            both[name] = {**second[name], **first[name]}
    if "required" in first and "required" in second:
        both["required"] = [*first["required"], *second["required"]]
    return both


def _kind_of(schema: Mapping[str, Any]) -> str:
    for names, kind in (
        (("properties", "required", "additionalProperties"), "object"),
        (("items", "prefixItems"), "array"),
        (("minimum", "maximum"), "number"),
    ):
        if any(name in schema for name in names):
            return kind
    return "string"


def _size(schema: Any) -> int:
    return len(str(schema)) + 1000 * ("$ref" in schema if isinstance(schema, Mapping) else 0)


def _is_free(items: Any) -> bool:
    return isinstance(items, Mapping) and set(items) <= {"type", "title", "description"}


_SET = string.ascii_lowercase + string.digits + string.ascii_uppercase + " _-.,:/@#"
"""Characters that are tried for a set of characters, the likely ones first."""


def _matching(pattern: str, draws: Random) -> str:
    """A text that a regular expression finds; empty for an expression that cannot be read."""
    try:
        tree = re._parser.parse(pattern)  # type: ignore[attr-defined]
    except re.error:
        return ""
    return _text_of(tree, draws, {})


def _text_of(tree: Sequence[tuple[Any, Any]], draws: Random, groups: dict[int, str]) -> str:
    made = ""
    for kind, value in tree:
        match str(kind):
            case "LITERAL":
                made += chr(value)
            case "NOT_LITERAL":
                made += next(each for each in _SET if ord(each) != value)
            case "ANY":
                made += "a"
            case "IN":
                made += _member(value, draws)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                least, most, body = value
                count = min(int(most), max(int(least), 1))
                made += "".join(_text_of(body, draws, groups) for _ in range(count))
            case "SUBPATTERN":
                text = _text_of(value[3], draws, groups)
                if value[0] is not None:
                    groups[value[0]] = text
                made += text
            case "BRANCH":
                made += _text_of(draws.choice(value[1]), draws, groups)
            case "GROUPREF":
                made += groups.get(value, "")
            case "ATOMIC_GROUP":
                made += _text_of(value, draws, groups)
    return made


def _member(items: Sequence[tuple[Any, Any]], draws: Random) -> str:
    """A character of a set."""
    probe = re.compile("[" + "".join(_written(each) for each in items) + "]")
    known = [each for each in _SET if probe.match(each)]
    if known:
        return draws.choice(known)
    for kind, value in items:
        if str(kind) == "LITERAL":
            return chr(value)
        if str(kind) == "RANGE":
            return chr(value[0])
    return next(each for each in map(chr, range(33, 0x3000)) if probe.match(each))


_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}


def _written(item: tuple[Any, Any]) -> str:
    kind, value = str(item[0]), item[1]
    if kind == "NEGATE":
        return "^"
    if kind == "LITERAL":
        return re.escape(chr(value))
    if kind == "RANGE":
        return f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}"
    return _CATEGORIES[str(value)]
