"""Forced tools, JSON formats, several answers, log-probabilities and counts: what real clients ask for beside text."""

import json
from typing import Any

import aiohttp
import jsonschema
import openai
import pytest

from rollwright.engines.base import Sampling
from rollwright.gateway import CaptureRules
from rollwright.simulation.players import RandomPlayer
from rollwright.trajectory import check, samples

PERSON: Any = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE: Any = {
    "$defs": {"Leaf": {"type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"]}},
    "type": "object",
    "properties": {"leaf": {"$ref": "#/$defs/Leaf"}},
    "required": ["leaf"],
}
SCHEMAS = {"save": PERSON, "grow": TREE}
ASK: Any = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
CONSTRAINED = "sampled under a constraint: "


def chat_tools() -> Any:
    return [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]


def assert_fits(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "grow"}}])
async def test_a_forced_tool_is_called_with_arguments_that_fit(
    choice: Any, stream: bool, clients: Any, played: Any
) -> None:
    async with clients.openai(played.access) as client:
        asked = {**ASK, "tools": chat_tools(), "tool_choice": choice}
        if stream:
            async with client.chat.completions.stream(**asked) as events:
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(**asked)
        said = answer.choices[0]
        (call,) = said.message.tool_calls
        assert said.finish_reason == "tool_calls"
        assert_fits(call.function.name, call.function.arguments)
        assert choice == "required" or call.function.name == "grow"
        messages = [
            *ASK["messages"],
            said.message.to_dict(),
            {"role": "tool", "tool_call_id": call.id, "content": "ok"},
        ]
        await client.chat.completions.create(model="m", messages=messages, tools=chat_tools())
    first, second = check(played.trajectory).turns
    assert (first.extends, second.extends) == (None, 0)
    assert played.trajectory.untrained(first) == f"{CONSTRAINED}tool_call"
    assert played.trajectory.untrained(second) is None


async def test_constrained_tokens_are_marked_and_masked_and_all_others_trained(
    clients: Any, played: Any
) -> None:
    async with clients.openai(played.access) as client:
        await client.chat.completions.create(**ASK, response_format={"type": "json_object"})
        await client.chat.completions.create(**ASK)
    turns = check(played.trajectory).turns
    assert turns[0].sampling is not None
    assert turns[0].sampling.constraint == "json_object"
    assert turns[1].sampling is None
    assert [sum(each.mask) for each in samples(played.trajectory)] == [0, len(turns[1].sampled_ids)]
    assert played.trajectory.never_trained() == [f"{CONSTRAINED}json_object"]
    assert played.trajectory.not_trainable is None
    assert played.trajectory.metrics == {"gateway_formats_enforced": 1.0}


async def test_json_formats_hold_in_every_api(clients: Any, played: Any) -> None:
    async with clients.openai(played.access) as client:
        chat = await client.chat.completions.create(
            **ASK,
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        )
        wanted: Any = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
        response = await client.responses.create(model="m", input="go", text=wanted)
        loose = await client.responses.create(model="m", input="go", text={"format": {"type": "json_object"}})
        forced = await client.responses.create(
            model="m",
            input="go",
            tools=[{"type": "function", "name": "save", "parameters": PERSON, "strict": True}],
            tool_choice={"type": "function", "name": "save"},
        )
    for text in (chat.choices[0].message.content, response.output_text):
        jsonschema.validate(json.loads(text), PERSON)
    assert isinstance(json.loads(loose.output_text), dict)
    assert_fits(forced.output[0].name, forced.output[0].arguments)
    async with clients.anthropic(played.access) as client:
        tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
        for choice in ({"type": "any"}, {"type": "tool", "name": "grow"}):
            answer = await client.messages.create(**ASK, max_tokens=200, tools=tools, tool_choice=choice)
            block = answer.content[-1]
            assert (block.type, answer.stop_reason) == ("tool_use", "tool_use")
            jsonschema.validate(block.input, SCHEMAS[block.name])
        answer = await client.messages.create(
            **ASK, max_tokens=200, extra_body={"output_format": {"type": "json_schema", "schema": PERSON}}
        )
        jsonschema.validate(json.loads(answer.content[0].text), PERSON)
    assert all(turn.sampling is not None for turn in played.trajectory.turns)


async def test_allowed_tools_limit_what_may_be_called(clients: Any, played: Any, engine: Any) -> None:
    named = [{"type": "function", "function": {"name": "grow"}}]
    async with clients.openai(played.access) as client:
        for mode in ("required", "auto"):
            choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
            await client.chat.completions.create(**ASK, tools=chat_tools(), tool_choice=choice)
    outputs = [sampling.output for _, sampling, _ in engine.made]
    assert outputs[0].tools == ("grow",)
    assert outputs[1] is None


async def test_a_forced_call_that_the_token_limit_cuts_off_is_told_as_text(clients: Any, played: Any) -> None:
    async with clients.openai(played.access) as client:
        answer = await client.chat.completions.create(
            **ASK, tools=chat_tools(), tool_choice="required", max_tokens=10
        )
    assert answer.choices[0].finish_reason == "length"
    assert not answer.choices[0].message.tool_calls
    assert answer.choices[0].message.content == played.trajectory.turns[0].text


async def test_formats_can_be_left_to_the_model_and_then_all_is_trained(
    clients: Any, gateway: Any, engine: Any
) -> None:
    played = clients.rollout(gateway, engine, "ro-1", rules=CaptureRules(client_formats="ignored"))
    async with clients.openai(played.access) as client:
        await client.chat.completions.create(**ASK, tools=chat_tools(), tool_choice="required")
    assert played.trajectory.turns[0].sampling is None
    assert played.trajectory.metrics == {"gateway_formats_ignored": 1.0}


async def test_a_policy_that_cannot_constrain_says_so_before_anything_is_sampled(
    clients: Any, gateway: Any, engine: Any
) -> None:
    engine.constrains_output = False
    played = clients.rollout(gateway, engine, "ro-1")
    async with clients.openai(played.access) as client:
        with pytest.raises(openai.BadRequestError, match="client_formats: ignored"):
            await client.chat.completions.create(**ASK, response_format={"type": "json_object"})
    assert not engine.made
    with pytest.raises(Exception, match="the last one was refused: response_format"):
        played.recorder.raise_unused()


async def test_several_answers_are_samples_of_their_own_and_any_can_be_continued(
    clients: Any, played: Any, engine: Any
) -> None:
    async with clients.openai(played.access) as client:
        answer = await client.chat.completions.create(**ASK, n=3)
        assert [each.index for each in answer.choices] == [0, 1, 2]
        texts = [each.message.content for each in answer.choices]
        assert answer.usage.completion_tokens == sum(len(made.sampled_ids) for _, _, made in engine.made)
        messages = [
            *ASK["messages"],
            {"role": "assistant", "content": texts[1]},
            {"role": "user", "content": "on"},
        ]
        await client.chat.completions.create(model="m", messages=messages)
        stream = await client.chat.completions.create(**ASK, n=2, stream=True)
        seen = {choice.index async for chunk in stream for choice in chunk.choices}
    turns = check(played.trajectory).turns
    assert [turn.text for turn in turns[:3]] == texts
    assert len(set(texts)) == 3
    assert [turn.extends for turn in turns] == [None, None, None, 1, None, None]
    assert seen == {0, 1}
    assert "gateway_undelivered" not in played.trajectory.metrics
    trained = sum(sum(each.mask) for each in samples(played.trajectory))
    assert trained == sum(len(made.sampled_ids) for _, _, made in engine.made)


async def test_log_probabilities_are_those_of_the_engine(clients: Any, played: Any, engine: Any) -> None:
    async with clients.openai(played.access) as client:
        chat = await client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
        response = await client.responses.create(
            model="m", input="go", include=["message.output_text.logprobs"]
        )
        plain = await client.chat.completions.create(**ASK)
        text = await client.completions.create(model="m", prompt="go", logprobs=1)
    made = [each.logprobs.tolist()[:-1] for _, _, each in engine.made]  # without the end of the turn
    assert [each.logprob for each in chat.choices[0].logprobs.content] == pytest.approx(made[0])
    assert [each.logprob for each in response.output[0].content[0].logprobs] == pytest.approx(made[1])
    assert plain.choices[0].logprobs is None
    assert text.choices[0].logprobs.token_logprobs == pytest.approx(made[3])
    assert "".join(text.choices[0].logprobs.tokens[:5]) == text.choices[0].text[:5]


async def test_legacy_completions_ask_the_prompt_as_a_question(clients: Any, played: Any) -> None:
    async with clients.openai(played.access) as client:
        answer = await client.completions.create(model="m", prompt="Say something.", max_tokens=50)
        stream = await client.completions.create(model="m", prompt="Say something.", stream=True)
        text = "".join([choice.text async for chunk in stream for choice in chunk.choices])
    assert [answer.choices[0].text, text] == [turn.text for turn in played.trajectory.turns]


async def test_models_can_be_retrieved_by_any_name(clients: Any, played: Any) -> None:
    async with clients.openai(played.access) as client:
        assert (await client.models.retrieve("gpt-5")).id == "gpt-5"
        assert (await client.models.retrieve("owner/name")).id == "owner/name"
        assert [each.id async for each in client.models.list()] == ["policy"]
    async with clients.anthropic(played.access) as client:
        assert (await client.models.retrieve("claude-4")).display_name == "claude-4"
        assert [each.id async for each in client.models.list()] == ["policy"]


async def test_tokens_are_counted_without_sampling(clients: Any, played: Any, engine: Any) -> None:
    system, tools = "Be brief.", [{"name": "save", "input_schema": PERSON}]
    async with clients.anthropic(played.access) as client:
        counted = await client.messages.count_tokens(**ASK, system=system, tools=tools)
        assert not engine.made
        answer = await client.messages.create(**ASK, system=system, tools=tools, max_tokens=50)
        assert counted.input_tokens == answer.usage.input_tokens
        said = [block.to_dict() for block in answer.content]
        messages = [
            *ASK["messages"],
            {"role": "assistant", "content": said},
            {"role": "user", "content": "on"},
        ]
        counted = await client.messages.count_tokens(model="m", system=system, tools=tools, messages=messages)
        answer = await client.messages.create(
            model="m", system=system, tools=tools, messages=messages, max_tokens=50
        )
        assert counted.input_tokens == answer.usage.input_tokens
    url = f"{played.access.base_url}/responses/input_tokens"
    headers = {"Authorization": f"Bearer {played.access.api_key}"}
    async with (
        aiohttp.ClientSession() as plain,
        plain.post(url, json={"input": "go"}, headers=headers) as told,
    ):
        assert (await told.json())["input_tokens"] > 0
    assert len(engine.made) == 2
    assert "gateway_rewritten" not in played.trajectory.metrics


async def test_tools_that_the_provider_would_run_are_passed_over_with_a_note(
    clients: Any, played: Any
) -> None:
    codex: Any = [
        {"type": "function", "name": "shell", "parameters": PERSON},
        {"type": "namespace", "name": "mcp", "tools": [{"type": "local_shell", "name": "x"}]},
        {"type": "web_search", "external_web_access": False},
    ]
    async with clients.openai(played.access) as client:
        raw = await client.responses.with_raw_response.create(model="m", input="go", tools=codex)
        history: Any = [{"role": "user", "content": "go"}, {"type": "web_search_call", "id": "ws"}]
        await client.responses.create(model="m", input=history, tools=codex)
    assert "local_shell, web_search" in raw.headers["x-rollwright-note"]
    assert [tool.name for tool in raw.parse().tools] == ["shell"]
    async with clients.anthropic(played.access) as client:
        tools: Any = [{"type": "web_search_20250305", "name": "web_search"}]
        await client.messages.create(**ASK, max_tokens=20, tools=tools)
    assert played.trajectory.metrics["gateway_tools_ignored"] == 3


async def test_players_obey_a_format_too(clients: Any, gateway: Any) -> None:
    played = clients.rollout(gateway, RandomPlayer(), "ro-1", sampling=Sampling(max_tokens=256))
    async with clients.openai(played.access) as client:
        answer = await client.chat.completions.create(**ASK, tools=chat_tools(), tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    assert_fits(call.function.name, call.function.arguments)
