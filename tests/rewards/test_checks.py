"""Rewards that compare the answer's text with the task."""

from collections.abc import Callable
from typing import Any

import pytest

from rollwright.rewards import RewardFailure, Rewards
from rollwright.trajectory import Trajectory

Attempts = Callable[..., Trajectory]

ENDLESS = "^(?:a|aa)+$"
"""Tries every way to cut a row of letters, of which there are more than anybody can wait for."""


async def value_of(settings: Any, task: dict[str, Any], trajectory: Trajectory) -> float:
    return (await Rewards.build([settings]).evaluate(task, trajectory)).total


@pytest.mark.parametrize(
    ("options", "right", "answer", "expected"),
    [
        ({}, "Paris", " Paris \n", 1),
        ({}, "Paris", "paris", 0),
        ({}, "New  York", "New York", 1),
        ({}, ["Paris", "Lutetia"], "Lutetia", 1),
        ({}, 4, "4", 1),
        ({}, "4", "14", 0),
        ({"ignore_case": True}, "Straße", "STRASSE", 1),
        ({"ignore_punctuation": True}, "U.S.A.", "USA", 1),
        ({"ignore_articles": True, "ignore_case": True}, "the end", "An end", 1),
        ({"numeric": True}, "1000", "$1,000.00", 1),
        ({"numeric": True}, 0.5, "50%", 1),
        ({"numeric": True}, "4", "4 apples", 0),
        ({"numeric": True}, "4", "5", 0),
        ({"numeric": True}, "x", "x", 1),
        ({"extract": r"####\s*(.+)"}, "42", "first #### 7\nthen #### 42", 1),
        ({"extract": r"####\s*(.+)"}, "42", "42", 0),
        ({"extract": r"\d+"}, "42", "it is 42", 1),
    ],
)
async def test_exact_match(
    options: dict[str, Any], right: Any, answer: str, expected: float, attempt_with: Attempts
) -> None:
    task = {"answer": right}
    assert await value_of({"kind": "exact_match", **options}, task, attempt_with(answer)) == expected


@pytest.mark.parametrize(
    ("options", "answer", "expected"),
    [
        ({"pattern": r"\bfour\b"}, "it is four.", 1),
        ({"pattern": r"\bfour\b"}, "fourteen", 0),
        ({"pattern": "four", "whole": True}, "four!", 0),
        ({"pattern": "FOUR", "ignore_case": True, "whole": True}, "four", 1),
    ],
)
async def test_regex(options: dict[str, Any], answer: str, expected: float, attempt_with: Attempts) -> None:
    assert await value_of({"kind": "regex", **options}, {}, attempt_with(answer)) == expected


async def test_an_expression_that_does_not_end_on_an_answer_is_a_failure(attempt_with: Attempts) -> None:
    endless = {"kind": "regex", "pattern": ENDLESS, "seconds": 0.2}
    with pytest.raises(RewardFailure, match=r"did not come to an end on the answer within 0\.2 s"):
        await value_of(endless, {}, attempt_with("a" * 80 + "!"))


@pytest.mark.parametrize(
    ("options", "answer", "expected"),
    [
        ({"texts": ["a", "b"]}, "a and b", 1),
        ({"texts": ["a", "z"]}, "a and b", 0),
        ({"texts": ["a", "z"], "needs": "any"}, "a and b", 1),
        ({"texts": ["y", "z"], "needs": "none"}, "a and b", 1),
        ({"texts": ["A"], "ignore_case": True}, "a", 1),
        ({"field": "words"}, "red, green", 1),
        ({"field": "words"}, "red", 0),
    ],
)
async def test_contains(
    options: dict[str, Any], answer: str, expected: float, attempt_with: Attempts
) -> None:
    task = {"words": ["red", "green"]}
    assert await value_of({"kind": "contains", **options}, task, attempt_with(answer)) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"limit": 10}, 0.0),
        ({"limit": 9}, -1.0),
        ({"limit": 5, "ramp": 10}, -0.5),
        ({"limit": 0, "ramp": 5}, -1.0),
        ({"limit": 100, "unit": "tokens"}, 0.0),
        ({"limit": 100, "ramp": 80, "unit": "tokens"}, -0.0),
        ({"limit": 20, "ramp": 80, "unit": "tokens"}, -0.25),
    ],
)
async def test_length(options: dict[str, Any], expected: float, attempt_with: Attempts) -> None:
    trajectory = attempt_with("ten chars!", tokens=40)
    assert await value_of({"kind": "length", **options}, {}, trajectory) == expected


SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "code": {"type": "string", "pattern": "^[A-Z]+$"}},
    "required": ["age"],
}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"age": 4}', 1),
        ('```json\n{"age": 4, "code": "AB"}\n```', 1),
        ('{"age": "4"}', 0),
        ('{"age": 4, "code": "ab"}', 0),
        ("{}", 0),
        ("four", 0),
        ("NaN", 0),
        ("[" * 100_000, 0),
    ],
)
async def test_json_schema(answer: str, expected: float, attempt_with: Attempts) -> None:
    pytest.importorskip("jsonschema")
    inline = {"kind": "json_schema", "json_schema": SCHEMA}
    of_task = {"kind": "json_schema", "field": "schema"}
    assert await value_of(inline, {}, attempt_with(answer)) == expected
    assert await value_of(of_task, {"schema": SCHEMA}, attempt_with(answer)) == expected


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": 7}, "the task's 'schema' is not a JSON schema"),
        ({"$ref": "http://localhost:9/schema.json"}, "raised"),
        ({"pattern": ENDLESS}, "did not come to an end"),
    ],
)
async def test_a_schema_that_cannot_be_used_is_a_failure(
    schema: Any, says: str, attempt_with: Attempts
) -> None:
    pytest.importorskip("jsonschema")
    with pytest.raises(RewardFailure, match=says):
        await value_of(
            {"kind": "json_schema", "field": "schema"},
            {"schema": schema},
            attempt_with(f'"{"a" * 80}!"'),
        )


@pytest.mark.parametrize(
    ("returned", "key", "expected"), [(0.5, None, 0.5), (True, None, 1.0), ({"a": 1, "b": 2}, "b", 2.0)]
)
async def test_returned_is_the_number_that_the_agent_returned(
    returned: Any, key: str | None, expected: float, attempt_with: Attempts
) -> None:
    settings = {"kind": "returned", "key": key}
    assert await value_of(settings, {}, attempt_with(returned=returned)) == expected


async def test_returned_named_numbers_are_components(attempt_with: Attempts) -> None:
    result = await Rewards.build("returned").evaluate({}, attempt_with(returned={"b": 2, "a": 1}))
    assert result.components == {"returned.a": 1.0, "returned.b": 2.0}


@pytest.mark.parametrize("returned", [None, "good", [1], {"a": "x"}])
async def test_returned_without_a_number_is_a_failure(returned: Any, attempt_with: Attempts) -> None:
    with pytest.raises(RewardFailure, match=r"^reward returned: "):
        await value_of("returned", {}, attempt_with(returned=returned))


@pytest.mark.parametrize(
    "settings",
    [
        "exact_match",
        {"kind": "contains", "field": "answer"},
        {"kind": "unit_tests", "field": "answer"},
        {"kind": "json_schema", "field": "answer"},
    ],
)
async def test_a_task_without_the_field_is_a_failure_that_names_the_fields_it_has(
    settings: Any, attempt_with: Attempts
) -> None:
    with pytest.raises(RewardFailure, match="has no field 'answer'; its fields are: question, id"):
        await value_of(settings, {"question": "?", "id": 3}, attempt_with())


@pytest.mark.parametrize("right", [[], {}, None, True, [["4"]]])
async def test_a_right_answer_that_is_no_text_is_a_failure(right: Any, attempt_with: Attempts) -> None:
    with pytest.raises(RewardFailure, match="reward exact_match: the task's 'answer'"):
        await value_of("exact_match", {"answer": right}, attempt_with())
