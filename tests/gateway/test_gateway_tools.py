"""Tools through the gateway: calls, results and thoughts, in two model families and three APIs, with exact ids."""

import json
from functools import cache
from typing import Any

import pytest

from rollwright.engines.base import Generation, Prompt, Renderer, Sampling
from rollwright.engines.rendering import make_renderer
from rollwright.gateway import Gateway
from rollwright.models.tiny import tiny_tokenizer
from rollwright.trajectory import FinishReason, VersionRun, check, floats, full_prompt, token_ids

SPECIAL = {
    "qwen3": "<|endoftext|> <tool_call> </tool_call> <tool_response> </tool_response> <think> </think>",
    "llama-3": "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|end_of_text|> <|eom_id|>",
}
CALLS = {
    "qwen3": '<tool_call>\n{"name": "look", "arguments": {"where":  "left", "how": "far"}}\n</tool_call><|im_end|>',
    "llama-3": '{"name": "look", "parameters": {"where":  "left", "how": "far"}}<|eot_id|>',
}
ENDS = {"qwen3": "there<|im_end|>", "llama-3": "there<|eot_id|>"}
SCHEMA = {"type": "object", "properties": {"where": {"type": "string"}, "how": {"type": "string"}}}
ARGUMENTS = {"how": "far", "where": "left"}


@cache
def family(name: str) -> tuple[Any, Renderer]:
    made: Any = tiny_tokenizer(["user assistant system tool look where how left far there\n"] * 4, 400)
    made.add_tokens(SPECIAL[name].split(), special_tokens=True)
    return made, make_renderer(made, name)


class Script:
    """Says one text after the other, a character at a time: not as the tokenizer would have written it."""

    version = 5
    pressure = 0

    def __init__(self, name: str, texts: list[str]) -> None:
        self._tokenizer, self.renderer = family(name)
        self._texts = texts
        self._special = [*SPECIAL[name].split(), "<|im_end|>"]
        self.saw: list[tuple[Any, Any]] = []

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        text = self._texts[len(self.saw)]
        ids = token_ids()
        while text:
            mark = next((each for each in self._special if text.startswith(each)), text[0])
            ids += token_ids(self._tokenizer.encode(mark, add_special_tokens=False))
            text = text[len(mark) :]
        self.saw.append((prompt.ids, ids))
        said = self.renderer.decode(ids)
        logprobs = floats([-0.25]) * len(ids)
        return Generation(said, ids, logprobs, (VersionRun(5, len(ids)),), FinishReason.STOP)

    async def close(self) -> None:
        """Holds nothing."""


def assert_one_exact_sequence(played: Any, script: Script) -> None:
    turns = check(played.trajectory).turns
    assert [turn.extends for turn in turns] == [None, *range(len(turns) - 1)]
    for turn, (prompt, sampled) in zip(turns, script.saw, strict=True):
        assert turn.sampled_ids == sampled
        assert full_prompt(turns, turn.id) == prompt
    assert not played.trajectory.metrics


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_chat_tool_calls_come_back_as_the_ids_that_were_sampled(
    name: str, stream: bool, clients: Any, gateway: Gateway
) -> None:
    script = Script(name, [CALLS[name], CALLS[name], ENDS[name]])
    played = clients.rollout(gateway, script, "ro-1")
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": "where is it?"}]
    async with clients.openai(played.access) as client:
        for _ in range(2):
            asked = {"model": "m", "messages": messages, "tools": tools}
            if stream:
                async with client.chat.completions.stream(**asked) as events:
                    answer = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(**asked)
            assert answer.choices[0].finish_reason == "tool_calls"
            (call,) = answer.choices[0].message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("look", ARGUMENTS)
            written_anew = {"name": "look", "arguments": json.dumps(ARGUMENTS, indent=1)}
            again = {"id": call.id, "type": "function", "function": written_anew}
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [again]},
                {"role": "tool", "tool_call_id": call.id, "content": "nothing there"},
            ]
        last = await client.chat.completions.create(model="m", messages=messages, tools=tools)
    assert last.choices[0].message.content == "there"
    assert_one_exact_sequence(played, script)


async def test_responses_tool_calls(clients: Any, gateway: Gateway) -> None:
    script = Script("qwen3", [f"so<tool_call>{CALLS['qwen3'].removeprefix('<tool_call>')}", ENDS["qwen3"]])
    played = clients.rollout(gateway, script, "ro-1")
    tools: Any = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}]
    async with clients.openai(played.access) as client:
        async with client.responses.stream(model="m", input="where?", tools=tools) as stream:
            first = await stream.get_final_response()
        said, call = first.output
        assert (said.content[0].text, call.name, json.loads(call.arguments)) == ("so", "look", ARGUMENTS)
        history: list[Any] = [{"role": "user", "content": "where?"}]
        history += [item.to_dict() for item in first.output]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "nothing"})
        last = await client.responses.create(model="m", input=history, tools=tools)
    assert last.output_text == "there"
    assert_one_exact_sequence(played, script)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_anthropic_tool_calls_and_thoughts(stream: bool, clients: Any, gateway: Gateway) -> None:
    thinking = f"<think>\nhm\n</think>\n\n{CALLS['qwen3']}"
    script = Script("qwen3", [thinking, ENDS["qwen3"]])
    played = clients.rollout(gateway, script, "ro-1")
    tools: Any = [{"name": "look", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": "where?"}]
    async with clients.anthropic(played.access) as client:
        asked: Any = {"model": "m", "max_tokens": 100, "tools": tools, "messages": messages}
        if stream:
            async with client.messages.stream(**asked) as events:
                first = await events.get_final_message()
        else:
            first = await client.messages.create(**asked)
        thought, call = first.content
        assert (thought.type, thought.thinking.strip()) == ("thinking", "hm")
        assert (first.stop_reason, call.name, call.input) == ("tool_use", "look", ARGUMENTS)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "nothing"}
        messages += [
            {"role": "assistant", "content": [block.to_dict() for block in first.content]},
            {"role": "user", "content": [result]},
        ]
        last = await client.messages.create(**asked)
    assert last.content[0].text == "there"
    assert_one_exact_sequence(played, script)


async def test_what_cannot_be_read_as_a_call_is_told_as_text(clients: Any, gateway: Gateway) -> None:
    script = Script("qwen3", ["<tool_call>\n{look left\n</tool_call><|im_end|>", ENDS["qwen3"]])
    played = clients.rollout(gateway, script, "ro-1")
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": "where is it?"}]
    async with clients.openai(played.access) as client:
        answer = await client.chat.completions.create(model="m", messages=messages, tools=tools)
        assert "look left" in answer.choices[0].message.content
        messages += [answer.choices[0].message, {"role": "user", "content": "again"}]
        await client.chat.completions.create(model="m", messages=messages, tools=tools)
    assert_one_exact_sequence(played, script)


async def test_other_tools_are_another_prompt(clients: Any, gateway: Gateway) -> None:
    script = Script("qwen3", [ENDS["qwen3"]] * 2)
    played = clients.rollout(gateway, script, "ro-1")
    messages: list[Any] = [{"role": "user", "content": "where is it?"}]
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    async with clients.openai(played.access) as client:
        answer = await client.chat.completions.create(model="m", messages=messages, tools=tools)
        messages += [answer.choices[0].message, {"role": "user", "content": "again"}]
        await client.chat.completions.create(model="m", messages=messages, tools=tools, tool_choice="none")
    assert [turn.extends for turn in played.trajectory.turns] == [None, None]
    assert played.trajectory.metrics["gateway_rewritten"] == 1
