"""A real model in this process: SmolLM2, fetched once into the local cache."""

import asyncio

import pytest
import torch

from rollwright.engines.base import Prompt, Sampling, UpdateMode, Weights
from rollwright.engines.settings import TorchPolicyConfig
from rollwright.engines.torch import TorchPolicy, load_policy
from rollwright.models import fetch, load_model
from rollwright.trajectory import FinishReason, Message, expand_versions

pytestmark = pytest.mark.engines

QUESTIONS = ("What is the capital of France?", "Name a colour.", "Say hello in German.", "What is 2 + 2?")


@pytest.fixture(scope="module")
def policy() -> TorchPolicy:
    fetch("smollm2")
    return load_policy(TorchPolicyConfig(model="smollm2", renderer="template"))


def ask(policy: TorchPolicy, question: str, number: int = 0) -> Prompt:
    messages = [Message("user", question)]
    return Prompt(f"e{number}", (question, number), messages, ids=policy.renderer.open(messages))


async def test_it_answers_a_question_and_ends_its_turn(policy: TorchPolicy) -> None:
    made = await policy.generate(ask(policy, QUESTIONS[0]), Sampling(temperature=0, max_tokens=24))
    await policy.close()
    assert "Paris" in made.text
    assert made.finish is FinishReason.STOP
    assert made.sampled_ids[-1] in policy.renderer.stop_ids


async def test_logprobs_of_many_calls_agree_with_a_plain_pass_before_and_after_new_weights(
    policy: TorchPolicy,
) -> None:
    models = {0: load_model("smollm2"), 1: load_model("smollm2")}
    with torch.no_grad():
        for weight in models[1].parameters():
            weight.mul_(1.01)
    prompts = [ask(policy, question, number) for number in range(2) for question in QUESTIONS]
    tasks = [asyncio.create_task(policy.generate(each, Sampling(max_tokens=16))) for each in prompts]
    while policy.counters.sampled_tokens < 40:
        await asyncio.sleep(0.01)
    tensors = {name: weight.detach() for name, weight in models[1].named_parameters()}
    await policy.update_weights(Weights(1, tensors=tensors), UpdateMode.ABORT_AND_RESUME)
    made = await asyncio.gather(*tasks)
    await policy.close()
    assert {version for each in made for version in expand_versions(each.versions)} == {0, 1}
    for asked, generation in zip(prompts, made, strict=True):
        assert asked.ids is not None
        whole = torch.tensor([[*asked.ids, *generation.sampled_ids]])
        for version in {run.version for run in generation.versions}:
            with torch.no_grad():
                logits = models[version](input_ids=whole).logits[0, len(asked.ids) - 1 : -1]
            logprobs = logits.log_softmax(-1)
            for place, stamp in enumerate(expand_versions(generation.versions)):
                if stamp == version:
                    expected = float(logprobs[place, generation.sampled_ids[place]])
                    assert generation.logprobs[place] == pytest.approx(expected, abs=1e-4)
