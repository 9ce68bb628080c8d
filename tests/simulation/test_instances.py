"""Values that players write under a schema are accepted by it."""

import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.simulation.instances import instance

NODE: Any = {
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "value": {"type": "number", "exclusiveMinimum": 0},
                "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                "more": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
            },
            "required": ["value", "next", "more"],
        }
    },
    "$ref": "#/$defs/Node",
}

SCHEMAS: list[Any] = [
    {},
    {"type": "object"},
    {"type": ["string", "null"], "minLength": 20},
    {"type": "string", "maxLength": 3},
    {"type": "string", "format": "date"},
    {"type": "array", "minItems": 4, "uniqueItems": True, "items": {"type": "string"}},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}], "minItems": 2, "items": False},
    {"type": "integer", "multipleOf": 7, "minimum": 10},
    {"type": "number", "minimum": -2, "exclusiveMaximum": -1.5},
    {"enum": ["a", 2, None]},
    {
        "allOf": [
            {"type": "object", "properties": {"q": {"const": 1}}, "required": ["q"]},
            {"required": ["r"]},
        ]
    },
    {"oneOf": [{"type": "integer"}, {"type": "string", "pattern": "^x+$"}]},
    NODE,
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_a_value_is_accepted_by_its_schema(schema: Any) -> None:
    for number in range(50):
        jsonschema.validate(instance(schema, "key", number), schema)


def test_the_same_key_gives_the_same_value_and_another_one_another() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 10**6}}, "required": ["n"]}
    assert instance(schema, "a", 1) == instance(schema, "a", 1)
    assert len({instance(schema, "a", number)["n"] for number in range(20)}) > 10


@pytest.mark.parametrize(
    "pattern",
    [r"^[A-Z]{3}-\d+(foo|bar)$", r"\w+@\w+\.com", r"^(a|b)\1$", r"[^abc]{2,5}?", r"^[\s]*$", r"^\S.*z$"],
)
def test_a_text_matches_its_pattern(pattern: str) -> None:
    for number in range(30):
        assert re.search(pattern, instance({"type": "string", "pattern": pattern}, number)), pattern


@given(low=st.integers(-1000, 1000), width=st.integers(0, 50), number=st.integers(0, 100))
def test_numbers_stay_within_their_bounds(low: int, width: int, number: int) -> None:
    for kind in ("integer", "number"):
        made = instance({"type": kind, "minimum": low, "maximum": low + width}, number)
        assert low <= made <= low + width
