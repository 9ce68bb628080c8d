"""A tool's schema follows from the function's signature and docstring, and arguments are validated against it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field

from rollwright.errors import ConfigError
from rollwright.tools import BadArguments, ToolContext, tool
from rollwright.tools.schema import read_docstring, read_signature


class Stop(BaseModel):
    """A place to stop at."""

    city: str
    nights: int = 1


@tool
def book(
    start: str,
    stops: list[Stop],
    kind: Literal["train", "bus"] = "train",
    budget: float | None = None,
    notes: Optional[dict[str, str]] = None,  # noqa: UP045 - both spellings are in use
    json: bool = False,
) -> str:
    """Books a journey.

    Takes the cheapest connection.

    Args:
        start (str): Where it begins,
            by the name of the town.
        stops: In order.
        kind: By what.

    Returns:
        The price.
    """
    return f"{start} {[stop.city for stop in stops]} {kind} {budget} {notes} {json}"


def test_a_schema_says_all_that_the_signature_and_the_docstring_say() -> None:
    assert book.spec.name == "book"
    assert book.spec.description == "Books a journey.\n\nTakes the cheapest connection."
    schema = book.spec.parameters
    assert schema["type"] == "object"
    assert schema["required"] == ["start", "stops"]
    properties = schema["properties"]
    assert list(properties) == ["start", "stops", "kind", "budget", "notes", "json"]
    assert properties["start"] == {
        "type": "string",
        "description": "Where it begins, by the name of the town.",
    }
    assert properties["stops"]["items"] == {"$ref": "#/$defs/Stop"}
    assert schema["$defs"]["Stop"]["properties"]["nights"]["type"] == "integer"
    assert properties["kind"]["enum"] == ["train", "bus"]
    assert {"type": "number"} in properties["budget"]["anyOf"]
    assert {"type": "null"} in properties["budget"]["anyOf"]
    assert properties["notes"]["anyOf"][0] == {"type": "object", "additionalProperties": {"type": "string"}}


def test_arguments_come_in_the_declared_types_and_defaults_are_the_functions_own() -> None:
    given = book.read('{"start": "Bern", "stops": [{"city": "Rome"}], "budget": "12.5"}')
    assert given == {"start": "Bern", "stops": [Stop(city="Rome")], "budget": 12.5}
    assert book(**given) == "Bern ['Rome'] train 12.5 None False"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "start: Field required; stops: Field required"),
        ('{"start": "a", "stops": [{"town": 1}]}', "stops.0.city: Field required"),
        ('{"start": "a", "stops": [], "kind": "car"}', "kind: Input should be 'train' or 'bus' (got 'car')"),
        ('{"start": "a", "stops": [], "via": 1}', "via: Extra inputs are not permitted"),
        ("[1]", "should be an object"),
        ("start=a", "Invalid JSON"),
    ],
)
def test_wrong_arguments_are_named(text: str, said: str) -> None:
    with pytest.raises(BadArguments) as caught:
        book.read(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_function_stays_callable_and_keeps_its_name() -> None:
    @tool(name="sum", description="Adds.")
    def add(a: int, b: int = 2) -> int:
        return a + b

    assert add(1) == 3
    assert add.__name__ == "add"
    assert (add.spec.name, add.spec.description) == ("sum", "Adds.")


def test_a_context_is_filled_in_and_not_shown() -> None:
    @tool
    async def remember(text: str, context: ToolContext) -> None: ...

    assert list(remember.spec.parameters["properties"]) == ["text"]
    assert remember.stateful


def test_a_description_beside_the_annotation_goes_first() -> None:
    def look(where: Annotated[str, Field(description="from the annotation")], how: str = "") -> None:
        """Looks.

        :param where: from the docstring
        :param str how: in which way
        """

    properties = read_signature(look, "look").json_schema()["properties"]
    assert properties["where"]["description"] == "from the annotation"
    assert properties["how"]["description"] == "in which way"


def test_a_function_without_annotations_takes_anything() -> None:
    def echo(value):  # type: ignore[no-untyped-def]
        return value

    assert read_signature(echo, "echo").read('{"value": [1, {"a": null}]}') == {"value": [1, {"a": None}]}


def test_what_no_schema_can_say_is_refused_with_the_tools_name() -> None:
    def spread(*values: int) -> None: ...

    def anything(**values: int) -> None: ...

    def odd(value: object_that_is_not_there) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    class Opaque: ...

    def opaque(value: Any) -> None: ...

    opaque.__annotations__["value"] = Opaque
    for function in (spread, anything, odd, opaque):
        with pytest.raises(ConfigError, match=f"^tool {function.__name__}: "):
            read_signature(function, function.__name__)


def test_a_docstring_with_other_sections_first_is_read() -> None:
    text = "Does it.\n\nNote:\n    Careful: it bites.\n\nArgs:\n    a: one\n    b (int, optional): two\n        more: of it\n"
    assert read_docstring(text) == ("Does it.", {"a": "one", "b": "two more: of it"})
