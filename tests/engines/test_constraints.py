"""Output formats: the schema of a forced call, what engines are asked for, and what a model in this process may sample."""

import asyncio
import json
from typing import Any

import jsonschema
import pytest
import torch

from rollwright.engines.base import (
    EngineError,
    OutputFormat,
    Prompt,
    Sampling,
    ToolSpec,
    UpdateMode,
    Weights,
    constrains_output,
)
from rollwright.engines.constraints import (
    chat_fields,
    forced_call,
    json_object,
    json_schema,
    or_call,
    read_output,
)
from rollwright.engines.llama_cpp import LlamaCppDialect
from rollwright.engines.openai import OpenAIPolicy
from rollwright.engines.openai_api import ChatApi
from rollwright.engines.partial import PartialCompletion
from rollwright.engines.rendering import make_renderer
from rollwright.engines.rendering.bytes import VOCABULARY_SIZE, BytesRenderer
from rollwright.engines.settings import OpenAIPolicyConfig, TorchServingConfig
from rollwright.engines.sglang import SglangDialect
from rollwright.engines.torch import TorchPolicy
from rollwright.engines.vllm import VllmDialect, VllmPolicy
from rollwright.errors import RollwrightError
from rollwright.models.loading import set_threads
from rollwright.models.tiny import tiny_llama, tiny_tokenizer
from rollwright.simulation.server_process import simulated_server
from rollwright.trajectory import FinishReason, Message, token_ids

LIST: Any = {
    "$defs": {
        "Item": {
            "type": "object",
            "properties": {"kind": {"$ref": "#/definitions/Kind"}, "next": {"$ref": "#/$defs/Item"}},
            "required": ["kind"],
        }
    },
    "definitions": {"Kind": {"enum": ["a", "b"]}},
    "type": "object",
    "properties": {"item": {"$ref": "#/$defs/Item"}, "again": {"$ref": "#"}},
    "required": ["item"],
}
PERSON: Any = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [ToolSpec("list", parameters=LIST), ToolSpec("save", parameters=PERSON)]


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


@pytest.mark.parametrize("tools", [TOOLS, TOOLS[:1]], ids=["several", "one"])
def test_references_of_a_tools_schema_still_hold_in_the_schema_of_its_call(tools: list[ToolSpec]) -> None:
    schema = forced_call(tools).schema
    jsonschema.Draft202012Validator.check_schema(schema)
    good = call("list", {"item": {"kind": "a", "next": {"kind": "b"}}, "again": {"item": {"kind": "a"}}})
    jsonschema.validate(good, schema)
    for wrong in (
        call("list", {"item": {"kind": "c"}}),
        call("list", {"item": {"kind": "a", "next": {"kind": "c"}}}),
        call("list", {"item": {"kind": "a"}, "again": {}}),
        call("other", {"item": {"kind": "a"}}),
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_a_completion_is_read_as_the_call_it_is_or_as_text() -> None:
    forced = forced_call(TOOLS)
    parsed = read_output('{"name": "save", "arguments": {"a":  1}}', forced, "id")
    assert [(each.id, each.name, each.arguments) for each in parsed.tool_calls] == [
        ("id", "save", '{"a":  1}')
    ]
    assert read_output('{"name": "sa', forced, "id").malformed == ('{"name": "sa',)
    either = or_call(json_schema(PERSON), TOOLS)
    assert read_output('{"name": "save", "arguments": {}}', either, "id").tool_calls
    for text in ('{"name": "eve", "age": 1}', '{"name": "eve", "arguments": {}}', '{"name": "e'):
        assert read_output(text, either, "id").content == text


def test_a_format_beside_tools_allows_the_answer_and_every_call() -> None:
    either = or_call(json_schema(LIST, "list"), TOOLS)
    for good in ({"item": {"kind": "a", "next": {"kind": "b"}}}, call("save", {"name": "eve", "age": 1})):
        jsonschema.validate(good, either.schema)
    for wrong in ({"item": {"kind": "c"}}, call("save", {"name": "eve", "age": 2})):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, either.schema)
    assert chat_fields(either)["response_format"]["json_schema"] == {"name": "list", "schema": LIST}
    assert chat_fields(forced_call(TOOLS)) == {"tool_choice": "required"}


def test_each_engine_is_asked_in_its_own_words() -> None:
    sampling = Sampling(output=json_schema(PERSON, "person"))
    partial = PartialCompletion(token_ids([1, 2]), sampling)
    vllm = json.loads(VllmDialect("m").request(partial))
    assert vllm["response_format"]["json_schema"] == {"name": "person", "schema": PERSON}
    assert (
        json.loads(json.loads(SglangDialect().request(partial))["sampling_params"]["json_schema"]) == PERSON
    )
    assert json.loads(LlamaCppDialect().request(partial))["json_schema"] == PERSON
    assert sampling.params().not_modelled == "sampled under a constraint: json_schema"


async def test_an_interrupted_constrained_completion_starts_again_at_an_engine(tmp_path: Any) -> None:
    """An engine begins its grammar with each request, so the tokens of an aborted one cannot be continued."""
    async with simulated_server(latency=0.5, latency_sigma=0.0, filler=200) as server:
        policy = VllmPolicy(server.base_url, "simulated", BytesRenderer())
        prompt = Prompt("e", ("k",), (), ids=token_ids([256, 65, 260, 258]))
        running = asyncio.create_task(policy.generate(prompt, Sampling(max_tokens=400, output=json_object())))
        await asyncio.sleep(0.2)
        await policy.update_weights(Weights(1, folder=tmp_path), UpdateMode.ABORT_AND_RESUME)
        made = await running
        assert policy.counters.restarted_calls == 1
        assert policy.counters.resumed_calls == 0
        assert [run.version for run in made.versions] == [1]
        assert made.exact
        await policy.close()


def tiny(seed: int = 0, **options: Any) -> TorchPolicy:
    set_threads()
    model = tiny_llama(VOCABULARY_SIZE, hidden_size=32, initializer_range=0.3, seed=seed)
    return TorchPolicy(model, BytesRenderer(), TorchServingConfig(**options))


def asked(number: int) -> Prompt:
    return Prompt(f"e{number}", ("test", number), (), ids=token_ids([256, 65 + number % 26, 260, 258]))


FORMATS: dict[str, OutputFormat] = {
    "schema": json_schema(PERSON),
    "call": forced_call(
        [TOOLS[1], ToolSpec("stop", parameters={"type": "object", "additionalProperties": False})]
    ),
    "references": forced_call(TOOLS),
    "either": or_call(json_schema(PERSON), [TOOLS[1]]),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.7])
async def test_whatever_the_weights_a_completion_that_ends_is_accepted_by_the_schema(
    name: str, temperature: float
) -> None:
    policy, output = tiny(), FORMATS[name]
    sampling = Sampling(temperature=temperature, max_tokens=400, output=output)
    made = await asyncio.gather(*(policy.generate(asked(number), sampling) for number in range(6)))
    await policy.close()
    ended = [each for each in made if each.finish is FinishReason.STOP]
    assert ended or name == "references"
    for each in ended:
        jsonschema.validate(json.loads(each.text), output.schema)


async def test_log_probabilities_are_those_of_the_allowed_tokens_and_other_calls_keep_theirs() -> None:
    free = Sampling(max_tokens=12)
    bound = Sampling(max_tokens=60, output=FORMATS["schema"])
    policy = tiny(batch_invariant=True)
    alone = await policy.generate(asked(1), free)
    beside, made = await asyncio.gather(policy.generate(asked(1), free), policy.generate(asked(2), bound))
    assert (beside.sampled_ids, beside.logprobs) == (alone.sampled_ids, alone.logprobs)
    assert made.text.startswith('{"name": "')
    assert made.logprobs[:10].tolist() == [0.0] * 10  # each of them is the only one that the schema allows
    model = policy._model
    with torch.no_grad():
        prompt = asked(2).ids
        assert prompt is not None
        logits = model(torch.tensor([[*prompt, *made.sampled_ids]])).logits[0]
    unmasked = torch.log_softmax(logits.float(), -1)
    for place, (token, logprob) in enumerate(zip(made.sampled_ids, made.logprobs, strict=True)):
        assert logprob >= float(unmasked[len(prompt) - 1 + place, token]) - 1e-4
    await policy.close()


async def test_new_weights_in_the_middle_do_not_break_the_format() -> None:
    policy, sampling = tiny(), Sampling(temperature=1.5, max_tokens=300, output=FORMATS["schema"])
    for version, mode in enumerate((UpdateMode.ABORT_AND_RESUME, UpdateMode.RESTART_TURN), 1):
        calls = [asyncio.create_task(policy.generate(asked(number), sampling)) for number in range(4)]
        while not policy.counters.sampled_tokens:
            await asyncio.sleep(0)
        tensors = tiny(version)._model.state_dict()
        await policy.update_weights(Weights(version, tensors=tensors), mode)
        for made in await asyncio.gather(*calls):
            if made.finish is FinishReason.STOP:
                jsonschema.validate(json.loads(made.text), PERSON)
    await policy.close()


async def test_a_schema_that_cannot_be_enforced_is_told_in_one_line() -> None:
    policy = tiny()
    with pytest.raises(RollwrightError, match="schema odd: cannot be enforced") as raised:
        await policy.generate(asked(0), Sampling(output=json_schema({"type": "riddle"}, "odd")))
    assert "\n" not in str(raised.value)
    assert not isinstance(raised.value, EngineError)
    await policy.close()


def test_a_chat_api_is_asked_for_the_format_and_enforces_it_itself() -> None:
    api = ChatApi("m")
    prompt = Prompt("e", ("k",), (Message("user", "go"),), tools=tuple(TOOLS))
    forced = json.loads(api.request(prompt, Sampling(output=forced_call(TOOLS[:1]))))
    assert forced["tool_choice"] == {"type": "function", "function": {"name": "list"}}
    assert [tool["function"]["name"] for tool in forced["tools"]] == ["list", "save"]
    typed = json.loads(api.request(prompt, Sampling(output=or_call(json_schema(PERSON, "person"), TOOLS))))
    assert typed["response_format"]["json_schema"] == {"name": "person", "schema": PERSON}
    assert constrains_output(OpenAIPolicy(OpenAIPolicyConfig(base_url="http://127.0.0.1:1/v1", model="m")))
    assert not constrains_output(
        OpenAIPolicy(OpenAIPolicyConfig(base_url="http://127.0.0.1:1/v1", model="m", api="completions"))
    )


async def test_a_tokenizer_of_whole_words_is_masked_as_well() -> None:
    set_threads()
    tokenizer: Any = tiny_tokenizer(['user assistant {"name": "eve", "age": 22}\n'] * 8, 320)
    model = tiny_llama(len(tokenizer) + 7, hidden_size=32, initializer_range=0.3)  # more logits than tokens
    renderer = make_renderer(tokenizer, "template")
    policy = TorchPolicy(model, renderer)
    sampling = Sampling(temperature=1.3, max_tokens=200, output=FORMATS["call"])
    ids = renderer.open([Message("user", "go")])
    calls = [policy.generate(Prompt(f"e{n}", ("words", n), (), ids=ids), sampling) for n in range(8)]
    made = await asyncio.gather(*calls)
    await policy.close()
    ended = [each for each in made if each.finish is FinishReason.STOP]
    assert ended
    for each in ended:
        jsonschema.validate(json.loads(each.text), FORMATS["call"].schema)
        assert each.sampled_ids[-1] in renderer.stop_ids
