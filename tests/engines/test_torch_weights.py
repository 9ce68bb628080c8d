"""New weights while calls are being served: three ways, and none drops a call or mixes up who made a token."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from rollwright.engines.base import EngineError, Generation, Prompt, Sampling, UpdateMode, Weights
from rollwright.engines.rendering.bytes import VOCABULARY_SIZE, BytesRenderer
from rollwright.engines.settings import TorchServingConfig
from rollwright.engines.torch import TorchPolicy
from rollwright.errors import ConfigError, FormatError, RollwrightError
from rollwright.models.loading import set_threads, weights_checksum
from rollwright.models.tiny import tiny_llama
from rollwright.rng import digest
from rollwright.trajectory import expand_versions, token_ids

CALLS = 24


@pytest.fixture(autouse=True)
def one_thread() -> None:
    set_threads()


def model(version: int) -> LlamaForCausalLM:
    """Other weights for every version."""
    return tiny_llama(VOCABULARY_SIZE, hidden_size=32, initializer_range=0.3, seed=version)


def weights(version: int) -> Weights:
    return Weights(version, tensors={name: each.detach() for name, each in model(version).named_parameters()})


def policy(**more: Any) -> TorchPolicy:
    own = {name: more.pop(name) for name in ("tokens_per_step", "cache_bytes", "version") if name in more}
    return TorchPolicy(model(0), BytesRenderer(), TorchServingConfig(**more), **own)


def prompt(number: int, length: int = 40) -> Prompt:
    ids = token_ids(digest("weights", number, place) % 256 for place in range(length))
    return Prompt(episode=f"e{number}", key=("test", number), messages=(), ids=ids)


def check(asked: Prompt, made: Generation) -> None:
    """Every token's log-probability is that of the version it is stamped with, given all before it."""
    assert asked.ids is not None
    whole = torch.tensor([[*asked.ids, *made.sampled_ids]])
    versions = expand_versions(made.versions)
    assert len(versions) == len(made.logprobs) == len(made.sampled_ids)
    for version in set(versions):
        with torch.no_grad():
            logits = model(version)(input_ids=whole).logits[0, len(asked.ids) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        for place, token in enumerate(made.sampled_ids):
            if versions[place] == version:
                assert made.logprobs[place] == pytest.approx(float(logprobs[place, token]), abs=1e-4)


async def load(
    it: TorchPolicy, tokens: int, started: int
) -> tuple[list[Prompt], list[asyncio.Task[Generation]]]:
    """Calls that are being served, with others behind them in line; back when so many tokens are sampled."""
    asked = [prompt(number, 20 + number) for number in range(CALLS)]
    tasks = [asyncio.create_task(it.generate(each, Sampling(max_tokens=tokens))) for each in asked]
    await sampled(it, started, tasks)
    return asked, tasks


async def sampled(it: TorchPolicy, tokens: int, tasks: list[asyncio.Task[Generation]]) -> None:
    """Back when so many tokens were sampled, or nobody waits for more."""
    while it.counters.sampled_tokens < tokens and not all(task.done() for task in tasks):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("batch_invariant", [False, True])
async def test_drain_lets_calls_finish_under_the_old_weights_while_others_wait(batch_invariant: bool) -> None:
    it = policy(max_batch=8, batch_invariant=batch_invariant)
    asked, tasks = await load(it, 30, started=16)
    await it.update_weights(weights(1), UpdateMode.DRAIN)
    assert it.version == 1
    made = await asyncio.gather(*tasks)
    await it.close()
    for each, generation in zip(asked, made, strict=True):
        assert len(generation.versions) == 1
        check(each, generation)
    assert {run.version for each in made for run in each.versions} == {0, 1}
    assert (it.counters.resumed_calls, it.counters.restarted_calls) == (0, 0)
    assert it.counters.completed == CALLS


@pytest.mark.parametrize("batch_invariant", [False, True])
async def test_abort_and_resume_keeps_tokens_and_stamps_each_with_its_version(batch_invariant: bool) -> None:
    it = policy(max_batch=8, batch_invariant=batch_invariant)
    asked, tasks = await load(it, 100, started=40)
    for version in (1, 2):
        before = it.counters.sampled_tokens
        await it.update_weights(weights(version), UpdateMode.ABORT_AND_RESUME)
        assert it.version == version
        await sampled(it, before + 40, tasks)
    made = await asyncio.gather(*tasks)
    await it.close()
    for each, generation in zip(asked, made, strict=True):
        check(each, generation)
    assert any(len(each.versions) > 1 for each in made)
    assert 0 < it.counters.resumed_calls <= 16
    assert it.counters.discarded_tokens == 0
    assert it.counters.sampled_tokens == sum(each.completion_tokens for each in made)


async def test_restart_turn_throws_tokens_away_and_counts_them() -> None:
    it = policy(max_batch=8)
    asked, tasks = await load(it, 60, started=40)
    await it.update_weights(weights(1), UpdateMode.RESTART_TURN)
    made = await asyncio.gather(*tasks)
    await it.close()
    for each, generation in zip(asked, made, strict=True):
        assert len(generation.versions) == 1
        check(each, generation)
    assert 0 < it.counters.restarted_calls <= 8
    assert it.counters.discarded_tokens > 0
    kept = sum(each.completion_tokens for each in made)
    assert it.counters.sampled_tokens == kept + it.counters.discarded_tokens


@pytest.mark.parametrize("mode", UpdateMode)
async def test_what_old_weights_computed_is_never_used_with_new_ones(mode: UpdateMode) -> None:
    it = policy()
    sampling = Sampling(max_tokens=4)
    first = await it.generate(prompt(1, 100), sampling)
    assert first.versions[0].version == 0
    await it.update_weights(weights(1), mode)
    second = await it.generate(prompt(1, 100), sampling)
    await it.close()
    assert second.versions[0].version == 1
    check(prompt(1, 100), second)


async def test_updates_that_come_fast_take_effect_in_order_and_no_call_is_lost() -> None:
    it = policy(max_batch=8)
    asked, tasks = await load(it, 30, started=8)
    modes = list(UpdateMode) * 2
    await asyncio.gather(*(it.update_weights(weights(n + 1), mode) for n, mode in enumerate(modes)))
    made = await asyncio.gather(*tasks)
    await it.close()
    assert it.counters.updates == len(modes)
    for each, generation in zip(asked, made, strict=True):
        check(each, generation)


async def test_a_folder_is_loaded_when_its_checksum_is_right(tmp_path: Path) -> None:
    model(3).save_pretrained(tmp_path)
    it = policy()
    await it.update_weights(
        Weights(3, folder=tmp_path, checksum=weights_checksum(tmp_path)), UpdateMode.DRAIN
    )
    made = await it.generate(prompt(1), Sampling(max_tokens=5))
    await it.close()
    assert made.versions[0].version == 3
    check(prompt(1), made)


async def test_a_bad_update_is_one_clear_line_and_the_old_weights_stay(tmp_path: Path) -> None:
    model(3).save_pretrained(tmp_path)
    checksum = weights_checksum(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] * 2}, file)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(file.read_bytes()[:-100])
    mine = dict(weights(1).tensors or {})
    norm = mine.pop("model.norm.weight")
    it = policy()
    cases: list[tuple[Weights, type[RollwrightError], str]] = [
        (Weights(3, folder=tmp_path, checksum=checksum), FormatError, "has checksum .* not the announced"),
        (Weights(3, folder=broken), FormatError, "not a whole safetensors file"),
        (Weights(3, folder=tmp_path / "none"), FormatError, "holds no .*safetensors"),
        (Weights(3), ConfigError, "neither a folder nor tensors"),
        (Weights(3, tensors=mine), FormatError, "model.norm.weight is missing"),
        (Weights(3, tensors={**mine, "model.norm.weight": norm[:5]}), FormatError, r"has shape \(5,\)"),
        (Weights(3, tensors={**mine, "what": norm}), FormatError, "what is not in the model"),
    ]
    for wrong, kind, line in cases:
        with pytest.raises(kind, match=line) as caught:
            await it.update_weights(wrong, UpdateMode.ABORT_AND_RESUME)
        assert "\n" not in str(caught.value)
    made = await it.generate(prompt(1), Sampling(max_tokens=5))
    await it.close()
    assert (it.version, it.counters.updates) == (0, 0)
    check(prompt(1), made)


async def test_weights_that_are_not_numbers_fail_calls_and_good_ones_heal_the_policy() -> None:
    it = policy()
    nothing = {name: each * float("nan") for name, each in (weights(1).tensors or {}).items()}
    await it.update_weights(Weights(1, tensors=nothing), UpdateMode.DRAIN)
    for sampling in (Sampling(), Sampling(temperature=0), Sampling(top_p=0.5)):
        with pytest.raises(EngineError, match="weights of version 1 gave logits that are not finite"):
            await it.generate(prompt(1), sampling)
    await it.update_weights(weights(2), UpdateMode.DRAIN)
    made = await it.generate(prompt(1), Sampling(max_tokens=5))
    await it.close()
    check(prompt(1), made)


async def test_an_update_that_is_cancelled_while_calls_drain_changes_nothing() -> None:
    it = policy(max_batch=8)
    asked, tasks = await load(it, 200, started=8)
    update = asyncio.create_task(it.update_weights(weights(1), UpdateMode.DRAIN))
    await asyncio.sleep(0.02)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    made = await asyncio.gather(*tasks)
    await it.close()
    assert it.version == 0
    for each, generation in zip(asked, made, strict=True):
        check(each, generation)


async def test_an_update_under_way_when_the_policy_is_closed_is_answered() -> None:
    it = policy()
    call = asyncio.create_task(it.generate(prompt(1), Sampling(max_tokens=900)))
    while not it.counters.sampled_tokens:
        await asyncio.sleep(0)
    update = asyncio.create_task(it.update_weights(weights(1), UpdateMode.DRAIN))
    await asyncio.sleep(0.05)
    await it.close()
    results = await asyncio.gather(call, update, return_exceptions=True)
    assert all(isinstance(each, EngineError) and "closed" in str(each) for each in results)
