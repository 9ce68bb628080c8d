"""What a model needs is estimated as it really is, and what is left beside it is shared out over calls. Row E3."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollwright.config import build
from rollwright.hardware import GIB
from rollwright.models.pools import KNOWN, LEAST_CALLS, LIBRARIES, ModelShape, Use, need_of, shape_of
from rollwright.models.tiny import tiny_llama
from rollwright.run import model_choice
from rollwright.run.model_choice import cache_room

CALLS, LENGTH, TRAINED = 24, 512, 1024


def test_the_estimate_is_what_a_model_really_takes(tmp_path: Path) -> None:
    tiny_llama(8000, hidden_size=256, layers=8, heads=8, kv_heads=4, max_length=1024).save_pretrained(
        tmp_path
    )
    done = subprocess.run(
        [
            sys.executable,
            Path(__file__).parent / "memory_probe.py",
            tmp_path,
            *map(str, (CALLS, LENGTH, TRAINED)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    took = json.loads(done.stdout)
    shape = shape_of("it", tmp_path)
    assert shape is not None
    played = need_of(shape, Use(concurrent=CALLS, length=LENGTH))
    trained = need_of(shape, Use(concurrent=CALLS, length=LENGTH, train_tokens=TRAINED))
    estimates = {
        "libraries": LIBRARIES,
        "played": played.fixed - LIBRARIES + CALLS * played.per_call,
        "trained": trained.fixed - LIBRARIES,
    }
    for part, estimate in estimates.items():
        assert 0.7 <= estimate / took[part] <= 2.0, (part, estimate, took[part])


def published(family: str, **settings: int) -> ModelShape:
    """Of a model that is made without memory, with the settings that its family publishes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, tie_word_embeddings=True, **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return ModelShape(
        parameters=sum(each.numel() for each in model.parameters()),
        vocabulary=config.vocab_size,
        width=config.hidden_size,
        layers=config.num_hidden_layers,
        cache_width=model.model.layers[0].self_attn.k_proj.out_features,
        inner=config.intermediate_size,
        source="known",
    )


@pytest.mark.parametrize(
    ("names", "family", "width", "inner", "layers", "heads", "kv_heads", "vocabulary"),
    [
        (["Gensyn/Qwen2.5-0.5B-Instruct"], "qwen2", 896, 4864, 24, 14, 2, 151_936),
        (
            ["Gensyn/Qwen2.5-1.5B-Instruct", "nvidia/AceInstruct-1.5B"],
            "qwen2",
            1536,
            8960,
            28,
            12,
            2,
            151_936,
        ),
        (["Qwen/Qwen3-0.6B"], "qwen3", 1024, 3072, 28, 16, 8, 151_936),
        (["dnotitia/Smoothie-Qwen3-1.7B"], "qwen3", 2048, 6144, 28, 16, 8, 151_936),
        (["smollm2"], "llama", 576, 1536, 30, 9, 3, 49_152),
    ],
)
def test_the_shipped_pools_have_the_sizes_that_are_published(
    names: list[str],
    family: str,
    width: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
) -> None:
    settings = {"head_dim": 128} if family == "qwen3" else {}
    shape = published(
        family,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        **settings,
    )
    for name in names:
        assert KNOWN[name] == shape


def test_many_episodes_of_great_length_do_not_rule_a_model_out() -> None:
    few, many = (
        need_of(KNOWN["Qwen/Qwen3-0.6B"], Use(concurrent=calls, length=8192)) for calls in (LEAST_CALLS, 4096)
    )
    assert few.total == many.total < 20 * GIB


@pytest.mark.parametrize("name", KNOWN)
def test_more_memory_serves_more_calls_and_never_more_than_there_are(name: str) -> None:
    need = need_of(KNOWN[name], Use(concurrent=64, length=2048, cache_bytes=512_000_000))
    memories = [need.total + each * GIB for each in (0, 4, 16, 64, 1024)]
    calls = [need.calls(memory) for memory in memories]
    assert calls == sorted(calls)
    assert calls[0] >= LEAST_CALLS
    assert calls[-1] == 64
    for memory, number in zip(memories, calls, strict=True):
        assert need.fixed + number * need.per_call + need.kept(memory) <= memory
    assert need.calls(0) == 1


def test_a_runs_cache_follows_the_memory_that_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_llama(300, hidden_size=32, layers=2).save_pretrained(tmp_path)
    policy = {"kind": "torch", "model": str(tmp_path), "device": "cpu"}
    rooms = []
    for free in (1, 8, 64):
        monkeypatch.setattr(model_choice, "free_device_memory", lambda device, free=free: free * GIB)
        rooms.append(cache_room(build({"policy": policy})))
    assert rooms == sorted(rooms)  # type: ignore[type-var]
    assert rooms[0] is not None
    assert 0 < rooms[0] < GIB
    monkeypatch.setenv("ROLLWRIGHT_WORKERS", "4")
    shared = cache_room(build({"policy": policy}))
    assert shared is not None
    assert shared < rooms[2] / 3  # type: ignore[operator]
    assert cache_room(build({"policy": {**policy, "cache_mb": 7}})) == 7_000_000
    assert cache_room(build({})) is None
