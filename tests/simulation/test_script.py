"""The simulated engine follows a script: tool calls, JSON, reasoning and text, by the conversation alone."""

from pathlib import Path
from typing import Any

import pytest

from rollwright.agents import Session
from rollwright.config import build, load
from rollwright.engines.base import EngineError, Sampling, ToolSpec
from rollwright.engines.constraints import forced_call, json_object
from rollwright.engines.factory import build_policy
from rollwright.errors import ConfigError
from rollwright.simulation.script import read_script
from rollwright.trajectory import Message, Trajectory

SCENES: list[Any] = [
    {
        "when": r"sum of (?P<a>\d+) and (?P<b>\d+)",
        "replies": [
            {
                "reasoning": "I add.",
                "call": {"name": "add", "arguments": {"a": "{a}", "b": "{b}", "note": "{a}+{b}"}},
            },
            {"say": "It is {result}."},
        ],
    },
    {"system": "JSON", "replies": [{"json": {"answer": "{question}"}}]},
    {"task": "shell", "replies": [{"say": "first"}, {"say": "second"}]},
    {"replies": [{"say": "hello"}]},
]
ADD = ToolSpec(
    "add", parameters={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
)


def session(script: Any) -> Session:
    policy = build_policy(
        build({"policy": {"kind": "simulated", "tokens_per_second": 1e6, "script": script}}).policy
    )
    trajectory = Trajectory("ro", "at", "group", "tag", 0)
    return Session(
        trajectory, policy, Sampling(max_tokens=400), ("ro",), sequence_length=8000, generate_timeout=10
    )


async def test_a_scene_calls_a_tool_thinks_and_answers_with_its_result() -> None:
    asked = session(SCENES)
    called = await asked.generate([Message("user", "the sum of 2 and 40?")], tools=[ADD])
    parsed = asked.parse(called)
    assert parsed.reasoning == "I add."
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [
        ("add", '{"a": 2, "b": 40, "note": "2+40"}')
    ]
    told = Message("tool", "42", tool_call_id=parsed.tool_calls[0].id)
    said = await asked.generate([told], continues=called, tools=[ADD])
    assert asked.parse(said).content == "It is 42."
    again = await asked.generate([Message("user", "the sum of 1 and 1?")], continues=said, tools=[ADD])
    assert '"a": 1' in asked.parse(again).tool_calls[0].arguments


async def test_scenes_are_chosen_by_system_prompt_task_and_order() -> None:
    asked = session(SCENES)
    strict = [Message("system", "Answer in JSON."), Message("user", "why?")]
    assert asked.parse(await asked.generate(strict)).content == '{"answer":"why?"}'
    first = await asked.generate([Message("user", "open a shell")])
    second = await asked.generate([Message("user", "done")], continues=first)
    third = await asked.generate([Message("user", "done")], continues=second)
    assert [first.text, second.text, third.text] == ["first", "second", "second"]
    assert (await asked.generate([Message("user", "anything")])).text == "hello"


async def test_a_script_obeys_a_format_and_uses_its_own_call_where_it_fits() -> None:
    asked = session(SCENES)
    forced = Sampling(max_tokens=400, output=forced_call([ADD]))
    own = await asked.generate([Message("user", "the sum of 2 and 40?")], tools=[ADD], sampling=forced)
    assert '"a":2' in asked.parse(own).tool_calls[0].arguments
    made = await asked.generate([Message("user", "anything")], tools=[ADD], sampling=forced)
    assert asked.parse(made).tool_calls[0].name == "add"
    free = await asked.generate(
        [Message("user", "hi")], sampling=Sampling(max_tokens=400, output=json_object())
    )
    assert free.text.startswith("{")


async def test_a_plain_list_of_replies_is_one_conversation() -> None:
    asked = session([{"say": "one"}, {"say": "two"}])
    first = await asked.generate([Message("user", "a")])
    second = await asked.generate([Message("user", "b")], continues=first)
    assert (first.text, second.text) == ("one", "two")


async def test_a_conversation_without_a_scene_is_an_engines_failure_that_says_so() -> None:
    player = read_script([{"when": "x", "replies": [{"say": "y"}]}])
    asked = session([{"when": "x", "replies": [{"say": "y"}]}])
    assert player is not None
    with pytest.raises(Exception, match="no scene matches 'abc'") as raised:
        await asked.generate([Message("user", "abc")])
    assert isinstance(raised.value.__cause__, EngineError) or "engine" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("s.yaml", "- say: from a file\n"),
        ("s.json", '[{"say": "from a file"}]'),
        ("s.jsonl", '{"say": "from a file"}\n\n{"say": "more"}\n'),
    ],
)
async def test_a_script_is_a_file_beside_the_configuration(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "run.yaml").write_text(f"policy: {{kind: simulated, script: {name}}}\n")
    config = load(tmp_path / "run.yaml")
    asked = session(str(tmp_path / name))
    assert getattr(config.policy, "script") == str(tmp_path / name)  # noqa: B009 - a policy of another kind has none
    assert (await asked.generate([Message("user", "a")])).text == "from a file"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ([{"sya": "x"}], "entry 1: .*sya"),
        ([{"replies": []}], "entry 1: .*replies"),
        ([{"replies": [{"say": "x"}], "when": "("}], "entry 1: .*regular expression"),
        ([{"replies": [{"say": "x"}], "when": "a", "task": "b"}], "entry 1: .*one of them"),
        ([], "holds no entries"),
        ("nowhere.yaml", "cannot be read"),
    ],
)
def test_a_wrong_script_is_told_in_one_line_with_the_entry(script: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        read_script(script)
    assert "\n" not in str(raised.value)
