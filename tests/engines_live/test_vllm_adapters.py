"""A real vLLM server gets a LoRA adapter while calls are under way: sooner than it answers a short call, and every token has
its version.

The seconds are printed: on an idle machine a fraction of one. The test compares them with calls of the same minute, because a
busy machine slows both."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollwright.engines.base import Generation, Prompt, Sampling, UpdateMode, Weights
from rollwright.engines.http_policy import HttpEnginePolicy
from rollwright.engines.vllm import VllmDialect
from rollwright.trajectory import Message, expand_versions

if TYPE_CHECKING:
    from vllm_server import VllmServer

pytestmark = pytest.mark.engines

PRECISION = 1e-3
"""Of vLLM in float32 against a forward pass of transformers."""
SHORT = 12
"""Tokens of a call that takes longer than a hand-over."""
VERSIONS = 3


@pytest.fixture(scope="module")
def lora_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[VllmServer]":
    from vllm_server import vllm_server

    flags = ("--enable-lora", "--max-lora-rank=8", "--max-loras=2")
    with vllm_server(model_folder, tmp_path_factory.mktemp("vllm-lora") / "log.txt", *flags) as started:
        yield started


@pytest.fixture(scope="module")
def exported(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Weights, Path]]:
    """Adapters of some versions, of one trainer, and the same weights merged."""
    import torch

    from rollwright.models import load_model
    from rollwright.training.settings import LoraSettings, TrainerSettings
    from rollwright.training.trainer import Trainer

    settings = TrainerSettings(lora=LoraSettings(rank=8), device="cpu")
    trainer = Trainer(load_model(model_folder), settings, seed=3)
    place = tmp_path_factory.mktemp("adapters")
    found = []
    for version in range(VERSIONS):
        trainer.version = version
        with torch.no_grad():
            for name, each in trainer._parameters.items():
                if version and "lora_B" in name:
                    each.add_(
                        torch.randn(each.shape, generator=torch.Generator().manual_seed(version)) * 0.01
                    )
        merged = place / f"merged{version}"
        trainer.export(merged)
        found.append((trainer.export_adapter(place / f"{version:06d}"), merged))
    return found


def logprobs(model: Any, prompt: Sequence[int], sampled: Sequence[int]) -> list[float]:
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1].float()
    scored = torch.log_softmax(logits, dim=-1)
    return [float(scored[place, token]) for place, token in enumerate(sampled)]


async def test_an_adapter_is_handed_over_in_less_time_than_a_short_call_and_every_token_is_exact(
    lora_server: "VllmServer", model_folder: Path, exported: list[tuple[Weights, Path]]
) -> None:
    from rollwright.engines.rendering import make_renderer
    from rollwright.engines.rendering.tokenizer import load_tokenizer
    from rollwright.models import load_model

    renderer = make_renderer(load_tokenizer(model_folder))
    policy = HttpEnginePolicy(lora_server.url, VllmDialect("smollm2"), renderer)

    async def call(place: int, tokens: int) -> tuple[Sequence[int], Generation]:
        ids = renderer.open([Message("user", f"Name {place + 2} rivers.")])
        prompt = Prompt(episode=f"e{place}", key=("live", place), messages=(), ids=ids)
        return ids.tolist(), await policy.generate(prompt, Sampling(max_tokens=tokens))

    took, short, made = [], [], []
    try:
        await policy.update_weights(exported[0][0], UpdateMode.ABORT_AND_RESUME)
        await call(0, 4)  # the first call with any adapter takes vLLM many seconds
        for version in range(1, VERSIONS):
            running = [asyncio.create_task(call(10 * version + place, 40)) for place in range(6)]
            await asyncio.sleep(1.0)  # they are being sampled
            began = time.perf_counter()
            await policy.update_weights(exported[version][0], UpdateMode.ABORT_AND_RESUME)
            took.append(time.perf_counter() - began)
            assert not all(each.done() for each in running)
            began = time.perf_counter()
            fresh = await asyncio.gather(*(call(100 * version + place, SHORT) for place in range(3)))
            short.append(time.perf_counter() - began)
            old = await asyncio.gather(*running)
            assert {v for _, each in old for v in expand_versions(each.versions)} == {version - 1}
            assert {v for _, each in fresh for v in expand_versions(each.versions)} == {version}
            made += [*old, *fresh]
        served = {each["id"] for each in (await policy._pool.controls[0].get("/v1/models"))["data"]}
        while len(served) > 2:  # the base model and the last adapter
            await asyncio.sleep(0.2)
            served = {each["id"] for each in (await policy._pool.controls[0].get("/v1/models"))["data"]}
        assert served == {"smollm2", exported[-1][0].adapter_name}
    finally:
        await policy.close()
    print(f"hand-over of an adapter: {', '.join(f'{each:.2f} s' for each in took)}")
    models = [load_model(merged) for _, merged in exported]
    differs = 0.0
    for prompt, each in made:
        version = expand_versions(each.versions)[0]
        expected = logprobs(models[version], prompt, each.sampled_ids.tolist())
        other = logprobs(models[(version + 1) % VERSIONS], prompt, each.sampled_ids.tolist())
        assert list(each.logprobs) == pytest.approx(expected, abs=PRECISION)
        differs = max(differs, *(abs(a - b) for a, b in zip(expected, other, strict=True)))
    assert differs > 10 * PRECISION, "versions can be told apart"
    assert sum(took) <= sum(short)
