"""Tools of the responses API beside functions: namespaces and custom tools are functions for the model, and themselves for
the client, in one unbroken sequence."""

import json
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.gateway.response_tools import (
    ResponseTool,
    call_item,
    custom_input,
    declare,
    flat_choice,
    present_call,
    read_call,
)
from rollwright.trajectory import ToolCall, samples

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
TOOLS: Any = [
    {
        "type": "namespace",
        "name": "crm",
        "description": "Customers.",
        "tools": [
            {
                "type": "function",
                "name": "find",
                "description": "Finds one.",
                "defer_loading": True,
                "parameters": {"type": "object", "properties": {"id": {"type": "string"}}},
            },
            {"type": "custom", "name": "note", "description": "Writes a note."},
        ],
    },
    {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR},
    {"type": "web_search"},
]
PATCH = '*** Begin Patch\n+ "quoted" \\ é\n*** End Patch'


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"call": {"name": name, "arguments": arguments}}


SCRIPT = [
    call("crm__find", {"id": "7"}),
    call("crm__note", {"input": "was here"}),
    call("apply_patch", {"input": PATCH}),
    {"say": "Done: {result}"},
]


@pytest.mark.parametrize("declared_in", ["tools", "input"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_calls_tools_of_its_own_kinds_in_one_sequence(
    clients: Any, gateway: Any, stream: bool, declared_in: str
) -> None:
    played = clients.rollout(gateway, clients.scripted(*SCRIPT), "ro-1")
    in_request: Any = {"tools": TOOLS} if declared_in == "tools" else {}
    declaring = {"type": "additional_tools", "role": "developer", "tools": TOOLS}
    history: list[Any] = [*([] if in_request else [declaring]), {"role": "user", "content": "go"}]
    said_before = len(history)
    seen = []
    async with clients.openai(played.access) as client:
        for _ in SCRIPT:
            asked = {"model": "m", "input": history, **in_request}
            if stream:
                async with client.responses.stream(**asked) as events:
                    kinds = {event.type async for event in events}
                    answer = await events.get_final_response()
                assert "response.completed" in kinds
            else:
                answer = await client.responses.create(**asked)
            (item,) = answer.output
            history.append(item.to_dict())
            if item.type == "message":
                break
            seen.append((item.type, item.namespace, item.name))
            given_back = item.type + "_output"
            history.append({"type": given_back, "call_id": item.call_id, "output": f"result {len(seen)}"})
    assert seen == [
        ("function_call", "crm", "find"),
        ("custom_tool_call", "crm", "note"),
        ("custom_tool_call", None, "apply_patch"),
    ]
    assert answer.output_text == "Done: result 3"
    assert history[said_before + 4]["input"] == PATCH
    trajectory = played.trajectory
    assert len(samples(trajectory)) == 1
    assert "gateway_rewritten" not in trajectory.metrics
    assert trajectory.metrics["gateway_tools_ignored"] == len(SCRIPT)  # web_search alone


def test_the_model_is_told_of_functions() -> None:
    declared = declare(msgspec.convert(TOOLS, list[ResponseTool]))
    tools = {each.name: each for each in declared.specs}
    assert set(tools) == {"crm__find", "crm__note", "apply_patch"}
    assert tools["crm__find"].description == "Customers.\nFinds one."
    assert GRAMMAR["definition"] in tools["apply_patch"].parameters["properties"]["input"]["description"]
    assert declared.passed_over == ("web_search",)


async def test_a_custom_tool_or_one_of_a_namespace_can_be_forced(clients: Any, gateway: Any) -> None:
    played = clients.rollout(gateway, clients.engine(), "ro-1")
    forced: Any
    async with clients.openai(played.access) as client:
        for forced, kind, name in (
            ({"type": "custom", "name": "apply_patch"}, "custom_tool_call", "apply_patch"),
            ({"type": "function", "name": "find", "namespace": "crm"}, "function_call", "find"),
        ):
            answer = await client.responses.create(model="m", input="go", tools=TOOLS, tool_choice=forced)
            (item,) = answer.output
            assert (item.type, item.name) == (kind, name)


@given(st.text(), st.text())
def test_the_text_of_a_custom_call_comes_back_as_the_same_call(text: str, raw: str) -> None:
    declared = declare([ResponseTool("custom", "patch")])
    for arguments in (json.dumps({"input": text}), raw):
        told = present_call(ToolCall("c", "patch", arguments), declared.origins)
        item = call_item(told, "fc", declared.origins)
        assert item["input"] == custom_input(arguments)
        assert read_call(item, "input[0]") == told


def test_arguments_without_a_text_are_the_text() -> None:
    assert custom_input('{"input": "a"}') == "a"
    for raw in ("plain", '{"input": 3}', "[1]", '{"other": "a"}'):
        assert custom_input(raw) == raw


def test_a_choice_names_the_models_functions() -> None:
    assert flat_choice("auto") == "auto"
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "a"}]}
    assert flat_choice(allowed)["tools"] == [{"type": "function", "name": "a"}]


async def test_tools_of_the_wrong_form_are_refused_with_their_place(clients: Any, played: Any) -> None:
    wrong: Any = [{"type": "additional_tools", "tools": [{"name": 3}]}, {"role": "user", "content": "go"}]
    async with clients.openai(played.access) as client:
        with pytest.raises(openai.UnprocessableEntityError, match=r"input\[0\]\.tools"):
            await client.responses.create(model="m", input=wrong)
