"""Tools through a chat API: they are sent, the calls are read, and the results go back under the calls' own ids."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter

from rollwright.agents import JournalEntry, Session
from rollwright.agents.tool_agent import ToolAgent
from rollwright.config import build
from rollwright.engines import EngineError, Prompt, Sampling
from rollwright.engines.base import ToolSpec
from rollwright.engines.openai import OpenAIPolicy
from rollwright.engines.openai_api import ChatApi
from rollwright.engines.settings import OpenAIPolicyConfig
from rollwright.errors import ConfigError, FormatError
from rollwright.gateway import Gateway, RolloutRecorder
from rollwright.http.retry import RetryPolicy
from rollwright.run.build_teams import build_run_policy
from rollwright.tools import Toolbox, tool
from rollwright.trajectory import Message, StopReason, ToolCall, Trajectory

REQUEST = TypeAdapter(CompletionCreateParamsNonStreaming)

Call = tuple[str | None, str, str]
"""Id, name and arguments."""


def completion(content: str | None, calls: Sequence[Call] = ()) -> dict[str, Any]:
    """As OpenAI's own SDK reads and writes it."""
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in calls
        ]
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if calls else "stop",
        "logprobs": None,
    }
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    body["usage"] = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    if all(id is not None for id, _, _ in calls):
        ChatCompletion.model_validate(body, strict=True)
    return body


class HostedApi:
    """Gives these answers one after the other, and refuses what OpenAI's SDK would not have sent, as the API does."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []

    async def answer(self, request: web.Request) -> web.Response:
        asked = await request.json()
        REQUEST.validate_python(asked)
        waiting: set[str] = set()
        for message in asked["messages"]:
            if message["role"] == "tool":
                waiting.remove(message["tool_call_id"])
            else:
                assert not waiting, f"no result for {waiting}"
                waiting = {call["id"] for call in message.get("tool_calls", ())}
        assert not waiting
        self.asked.append(asked)
        return web.json_response(self.answers[len(self.asked) - 1])


@asynccontextmanager
async def hosted(server: HostedApi, **options: Any) -> AsyncIterator[OpenAIPolicy]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    policy = OpenAIPolicy(
        OpenAIPolicyConfig(base_url=f"http://127.0.0.1:{port}/v1", model="m", **options),
        retry=RetryPolicy(max_retries=0),
    )
    try:
        yield policy
    finally:
        await policy.close()
        await runner.cleanup()


@tool
def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: Where.
    """
    return f"sunny in {city}"


class Records:
    def __init__(self, recorded: Sequence[JournalEntry] = ()) -> None:
        self.recorded = {entry.place: entry for entry in recorded}
        self.written: list[JournalEntry] = []

    async def append(self, entry: JournalEntry) -> None:
        self.written.append(JournalEntry.from_bytes(entry.to_bytes()))


def session_of(policy: OpenAIPolicy, journal: Any = None) -> Session:
    trajectory = Trajectory("ro", "at", "g", "tools", 0)
    return Session(
        trajectory, policy, Sampling(), ("k",), sequence_length=4096, generate_timeout=30, journal=journal
    )


PARALLEL = (("call_a", "weather", '{"city": "Rome"}'), ("call_b", "weather", '{"city": "Oslo"}'))


async def test_an_agent_uses_tools_through_a_chat_api() -> None:
    api = HostedApi(completion(None, PARALLEL), completion("Both are sunny."))
    async with hosted(api) as policy:
        journal = Records()
        solution = await ToolAgent(Toolbox([weather])).solve(session_of(policy, journal), "Rome, Oslo?")
        again = session_of(policy, Records(journal.written))
        assert (await ToolAgent(Toolbox([weather])).solve(again, "Rome, Oslo?")).answer == solution.answer
    assert (solution.answer, solution.stop) == ("Both are sunny.", StopReason.TERMINATED)
    first, second = api.asked  # the second time everything came from the journal
    assert first["tools"][0]["type"] == "function"
    assert first["tools"][0]["function"]["name"] == "weather"
    assert first["tools"][0]["function"]["parameters"]["properties"]["city"]["type"] == "string"
    assistant, rome, oslo = second["messages"][1:]
    assert assistant["content"] is None
    assert [(each["id"], each["function"]["arguments"]) for each in assistant["tool_calls"]] == [
        ("call_a", '{"city": "Rome"}'),
        ("call_b", '{"city": "Oslo"}'),
    ]
    assert rome == {"role": "tool", "tool_call_id": "call_a", "content": "sunny in Rome"}
    assert oslo["tool_call_id"] == "call_b"
    assert second["tools"] == first["tools"]


async def test_without_tools_none_are_sent() -> None:
    api = HostedApi(completion("Hello."))
    async with hosted(api) as policy:
        await policy.generate(Prompt("e", ("k",), [Message("user", "hi")]), Sampling())
    assert "tools" not in api.asked[0]


async def test_a_captured_agent_uses_tools_through_a_chat_api() -> None:
    from openai import AsyncOpenAI

    api = HostedApi(completion("Let me look.", PARALLEL), completion("Both are sunny."))
    spec = {
        "type": "function",
        "function": {"name": "weather", "description": "Tells.", "parameters": {"type": "object"}},
    }
    gateway = Gateway()
    async with hosted(api) as policy:
        session = session_of(policy)
        captured = RolloutRecorder(session, Sampling())
        access = gateway.open(captured)
        messages: list[Any] = [{"role": "user", "content": "Rome, Oslo?"}]
        async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
            told = await client.chat.completions.create(model="m", messages=messages, tools=[spec])  # type: ignore[list-item]
            said = told.choices[0].message
            assert told.choices[0].finish_reason == "tool_calls"
            assert [call.id for call in said.tool_calls or ()] == ["call_a", "call_b"]
            messages.append(said)
            for call in said.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
            told = await client.chat.completions.create(model="m", messages=messages, tools=[spec])  # type: ignore[list-item]
        await gateway.close_rollout(captured)
        await gateway.close()
    assert told.choices[0].message.content == "Both are sunny."
    assert [turn.tool_calls for turn in session.trajectory.turns][1] == ()
    assert session.trajectory.metrics == {}


def test_calls_are_read_whatever_a_server_makes_of_their_ids_and_arguments() -> None:
    body = completion(None, ((None, "f", "{}"), ("x", "f", "not json"), ("x", "g", "")))
    body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = {"n": 1}
    made = ChatApi("m").response(json.dumps(body).encode())
    assert made.tool_calls == (
        ToolCall("call_0", "f", '{"n":1}'),
        ToolCall("x", "f", "not json"),
        ToolCall("call_2", "g", ""),
    )
    body["choices"][0]["message"]["tool_calls"][0]["function"] = {"arguments": "{}"}
    with pytest.raises(FormatError, match="name"):
        ChatApi("m").response(json.dumps(body).encode())


async def test_plain_completions_refuse_tools() -> None:
    async with hosted(HostedApi(), api="completions") as policy:
        with pytest.raises(EngineError, match="plain completions do not support tools"):
            await policy.generate(Prompt("e", ("k",), [], tools=(ToolSpec("f"),)), Sampling())


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_a_team_with_tools_is_refused_at_the_start_where_its_policy_knows_of_none(kind: str) -> None:
    config = build(
        {
            "policy": {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "m", "api": kind},
            "custom_envs": {"Sums": {"env_type": "rollwright.teams.toy_envs:Sums"}},
            "train_env_manager": {"num_env_groups": 1, "group_size": 2, "tags": ["Sums"]},
            "orchestras": {"Sums": {"kind": "math", "agents": {"solver": {"tools": ["calculator"]}}}},
        }
    )
    if kind == "chat":
        build_run_policy(config)
        return
    with pytest.raises(
        ConfigError, match=r"solver\.tools: this agent's policy .* accepted: openai with `api: chat`"
    ):
        build_run_policy(config)
