"""A real vLLM server behind the gateway: forced tools, JSON and JSON schemas by its own grammars, and likeliest tokens."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import openai
import pytest

from rollwright.agents import Session
from rollwright.config import build
from rollwright.engines.base import Sampling
from rollwright.gateway import Gateway, RolloutRecorder
from rollwright.run.build_teams import build_run_policy
from rollwright.trajectory import Trajectory, check, samples

if TYPE_CHECKING:
    from vllm_server import VllmServer

pytestmark = pytest.mark.engines

PERSON: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["calm", "cross"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
CITY: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "save_person", "parameters": PERSON}},
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
]
ASK: Any = {"model": "m", "messages": [{"role": "user", "content": "Tell me about somebody in Lisbon."}]}
CONSTRAINED = "sampled under a constraint: "


class Recorded:
    """One rollout whose policy is the server."""

    def __init__(self, gateway: Gateway, policy: Any) -> None:
        self.trajectory = Trajectory("ro-1", "at-1", "group", "vllm", 0)
        sampling = Sampling(max_tokens=120)
        self.session = Session(
            self.trajectory, policy, sampling, ("ro-1",), sequence_length=2000, generate_timeout=300.0
        )
        self.access = gateway.open(RolloutRecorder(self.session, sampling))

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self.access.base_url, api_key=self.access.api_key, max_retries=0, timeout=300
        )

    def constraints(self) -> list[str | None]:
        """Why each turn is out of the loss."""
        return [check(self.trajectory).untrained(turn) for turn in self.trajectory.turns]


@pytest.fixture
async def recorded(server: "VllmServer", model_folder: Path) -> AsyncIterator[Recorded]:
    config = build(
        {
            "policy": {
                "kind": "vllm",
                "base_urls": [server.url],
                "model": "smollm2",
                "renderer": {"tokenizer": str(model_folder)},
            },
            "train_env_manager": {"num_env_groups": 1, "group_size": 1, "tags": ["FrozenLake"]},
        }
    )
    policy, gateway = build_run_policy(config), Gateway()
    try:
        yield Recorded(gateway, policy)
    finally:
        await gateway.close()
        await policy.close()


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["any", "named"]
)
async def test_a_forced_tool_is_called_with_arguments_that_fit(recorded: Recorded, choice: Any) -> None:
    schemas = {"save_person": PERSON, "get_weather": CITY}
    async with recorded.client() as client:
        answer = await client.chat.completions.create(**ASK, tools=TOOLS, tool_choice=choice)
        said = answer.choices[0]
        (call,) = said.message.tool_calls
        assert said.finish_reason == "tool_calls"
        assert choice == "required" or call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
        messages = [
            *ASK["messages"],
            said.message.to_dict(),
            {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"},
        ]
        free: Any = {"model": "m", "messages": messages, "tools": TOOLS}
        await client.chat.completions.create(**free)
    assert recorded.constraints() == [f"{CONSTRAINED}tool_call", None]
    (row,) = samples(recorded.trajectory)  # the free answer continues the forced one
    assert sum(row.mask) == len(recorded.trajectory.turns[1].sampled_ids)


async def test_json_and_json_schemas_are_enforced(recorded: Recorded) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    async with recorded.client() as client:
        for format in (schema, {"type": "json_object"}):
            answer = await client.chat.completions.create(**ASK, response_format=format)
            if answer.choices[0].finish_reason == "stop":
                found = json.loads(answer.choices[0].message.content or "")
                assert isinstance(found, dict)
            if format is schema:
                assert answer.choices[0].finish_reason == "stop"
                jsonschema.validate(found, PERSON)
        text: Any = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
        response = await client.responses.create(model="m", input="Invent somebody.", text=text)
        jsonschema.validate(json.loads(response.output_text), PERSON)
    assert recorded.constraints() == [
        f"{CONSTRAINED}json_schema",
        f"{CONSTRAINED}json_object",
        f"{CONSTRAINED}json_schema",
    ]


async def test_the_likeliest_tokens_are_those_of_the_server(recorded: Recorded) -> None:
    async with recorded.client() as client:
        answer = await client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3, max_tokens=12)
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content
    turn = recorded.trajectory.turns[0]
    for each, logprob in zip(told.content, turn.logprobs, strict=False):
        assert each.logprob == pytest.approx(logprob)
        values = [one.logprob for one in each.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        named = {one.token: one.logprob for one in each.top_logprobs}
        assert named.get(each.token, each.logprob) == pytest.approx(each.logprob, abs=1e-4)
        assert each.logprob <= values[0] + 1e-4
    assert recorded.constraints() == [None]
