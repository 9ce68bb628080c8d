"""Row E3: which model of the pools is picked for the memory that is free, and why."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.config import RunConfig, build
from rollwright.errors import ConfigError
from rollwright.hardware import GIB
from rollwright.models.fetching import Progress
from rollwright.models.hub import DownloadError
from rollwright.models.pools import KNOWN, ROOM, MemoryNeed, Use, choose_model, need_of, shape_of
from rollwright.models.tiny import tiny_llama
from rollwright.run import model_choice
from rollwright.run.model_choice import load_settled, settle_model, smaller_models

LARGE, SMALL = "default_large_model_pool", "default_small_model_pool"
POOLS = {LARGE: list(build({}).default_large_model_pool), SMALL: list(build({}).default_small_model_pool)}
TRAINED = Use(concurrent=32, length=1024, train_tokens=2048)


def need(model: str) -> MemoryNeed | None:
    shape = shape_of(model, None)
    return None if shape is None else need_of(shape, TRAINED)


def least(model: str) -> int:
    found = need(model)
    assert found is not None
    return found.total


def test_the_shipped_pools_have_their_names_and_known_sizes() -> None:
    assert POOLS[LARGE] == [
        "nvidia/AceInstruct-1.5B",
        "dnotitia/Smoothie-Qwen3-1.7B",
        "Gensyn/Qwen2.5-1.5B-Instruct",
    ]
    assert POOLS[SMALL] == ["Gensyn/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B", "smollm2"]
    assert {name for pool in POOLS.values() for name in pool} == set(KNOWN)


@pytest.mark.parametrize(
    ("free", "pool"), [(4, None), (8, None), (16, SMALL), (32, SMALL), (64, SMALL), (80, LARGE)]
)
def test_the_pool_follows_the_free_memory(free: int, pool: str | None) -> None:
    if pool is None:
        with pytest.raises(ConfigError, match=r"no model of .* fits .*add a smaller model such as `smollm2`"):
            choose_model(POOLS, need, free * GIB, 42)
        return
    assert choose_model(POOLS, need, free * GIB, 42).pool == pool


def test_what_is_only_played_needs_far_less() -> None:
    def played(model: str) -> MemoryNeed | None:
        return need_of(KNOWN[model], Use(concurrent=8))

    assert choose_model(POOLS, played, 2 * GIB, 42).model == "smollm2"
    assert choose_model(POOLS, played, 6 * GIB, 42).pool == SMALL
    assert choose_model(POOLS, played, 12 * GIB, 42).pool == LARGE


@given(st.integers(0, 200), st.integers(0, 1 << 40))
def test_the_choice_fits_and_depends_on_nothing_but_what_it_is_given(free: int, seed: int) -> None:
    try:
        choice = choose_model(POOLS, need, free * GIB, seed)
    except ConfigError:
        assert min(map(least, KNOWN)) > ROOM * free * GIB
        return
    assert choice.need <= ROOM * free * GIB
    assert choice == choose_model(POOLS, need, free * GIB, seed)
    assert choice.reasons[-1].startswith(f"chosen: {choice.model} of {choice.pool}, by seed {seed}")


def test_seeds_spread_over_the_pool() -> None:
    assert {choose_model(POOLS, need, 500 * GIB, seed).model for seed in range(50)} == set(POOLS[LARGE])


def test_what_ran_out_of_memory_is_followed_by_something_smaller() -> None:
    found, below = [], None
    for _ in range(9):
        try:
            choice = choose_model(POOLS, need, None, 7, below=below)
        except ConfigError:
            break
        found.append(choice.need)
        below = choice.need
    assert len(found) >= 2
    assert found == sorted(set(found), reverse=True)


def test_sizes_are_read_from_files_known_or_guessed(tmp_path: Path) -> None:
    model = tiny_llama(300, hidden_size=32, layers=3, heads=4, kv_heads=2)
    model.save_pretrained(tmp_path)
    shape = shape_of("whatever", tmp_path)
    assert shape is not None
    assert shape.parameters == sum(each.numel() for each in model.parameters())
    assert (shape.vocabulary, shape.width, shape.layers, shape.cache_width) == (300, 32, 3, 16)
    guessed = shape_of("someone/Thing-7B-Chat", None)
    assert guessed is not None
    assert guessed.parameters == 7_000_000_000
    assert shape_of("someone/thing", None) is None
    (tmp_path / "config.json").write_text("{}")
    assert shape_of("whatever", tmp_path) is None


@pytest.fixture
def pooled(tmp_path: Path) -> RunConfig:
    """Pools of folders: two small models and a larger one."""
    for name, width in (("tiny", 16), ("small", 32), ("large", 64)):
        tiny_llama(300, hidden_size=width, layers=1).save_pretrained(tmp_path / name)
    return build(
        {
            "policy": {"kind": "torch", "model": "auto", "device": "cpu"},
            "default_large_model_pool": [str(tmp_path / "large")],
            "default_small_model_pool": [str(tmp_path / "small"), str(tmp_path / "tiny")],
        }
    )


def model_of(config: RunConfig) -> str:
    return Path(config.policy.model).name  # type: ignore[union-attr]


def test_a_run_settles_on_a_model_once_and_says_why(pooled: RunConfig, tmp_path: Path) -> None:
    said: list[str] = []
    home = tmp_path / "home"
    assert model_of(settle_model(pooled, home=home, say=said.append)) == "large"
    assert "needs" in said[0]
    assert "chosen: " in said[-1]
    kept = json.loads((home / model_choice.CHOICE).read_text())
    assert kept["wanted"] == "auto"


def test_a_home_keeps_its_model_though_memory_has_changed(
    pooled: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = settle_model(pooled, home=tmp_path)
    monkeypatch.setattr(model_choice, "free_device_memory", lambda device: 0)
    said: list[str] = []
    assert settle_model(pooled, home=tmp_path, say=said.append) == first
    assert not said
    with pytest.raises(ConfigError, match="no model of"):
        settle_model(pooled)


def test_loading_steps_down_until_it_fits(pooled: RunConfig, tmp_path: Path) -> None:
    tried, said = [], []

    def load(config: RunConfig) -> str:
        tried.append(model_of(config))
        if tried[-1] != "tiny":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        return "loaded"

    settled, loaded = load_settled(pooled, load, home=tmp_path, say=said.append)
    assert loaded == "loaded"
    assert tried == ["large", "small", "tiny"] or tried == ["large", "tiny"]
    assert model_of(settled) == "tiny"
    assert any("ran out of memory" in line for line in said)
    assert model_of(settle_model(pooled, home=tmp_path)) == "tiny"


def test_another_failure_is_no_reason_to_step_down(pooled: RunConfig) -> None:
    def load(config: RunConfig) -> Any:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        load_settled(pooled, load)


def test_one_pool_can_be_named_and_what_is_smaller_is_known(pooled: RunConfig) -> None:
    policy = pooled.policy.model_copy(update={"model": SMALL})
    assert model_of(settle_model(pooled.model_copy(update={"policy": policy}))) in ("small", "tiny")
    assert [Path(each).name for each in smaller_models(pooled)] == ["large", "small", "tiny"]
    assert smaller_models(build({})) == []


HUB_POOLS = {
    "default_large_model_pool": ["owner/Large-1B"],
    "default_small_model_pool": ["owner/Small-500M", "smollm2"],
}


@pytest.fixture
def with_smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """On this machine there is one model of the pools; nothing else can be had."""
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(model_choice, "free_device_memory", lambda device: 64 * GIB)
    tiny_llama(300).save_pretrained(tmp_path / "models" / "smollm2")
    return build({"policy": {"kind": "torch", "model": "auto", "device": "cpu"}, **HUB_POOLS})


def test_offline_a_model_that_is_here_is_found_and_nothing_is_asked_for(
    with_smollm2: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(model_choice, "download", lambda *words, **more: pytest.fail("a request was made"))
    said: list[str] = []
    assert model_of(settle_model(with_smollm2, say=said.append)) == "smollm2"
    assert any("owner/Large-1B" in line and "not on this machine" in line for line in said)


def test_where_the_hub_does_not_answer_what_is_here_is_taken(
    with_smollm2: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(name: str, rules: Any, progress: Progress, on_trouble: Any) -> Path:
        on_trouble("no answer")
        raise DownloadError(f"model {name}: the hub does not answer")

    monkeypatch.setattr(model_choice, "download", unreachable)
    said: list[str] = []
    assert model_of(settle_model(with_smollm2, say=said.append)) == "smollm2"
    assert any("the hub does not answer" in line for line in said)
    assert sum("chosen:" in line for line in said) == 2


def test_offline_with_nothing_here_it_says_what_to_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = build({"policy": {"kind": "torch", "model": "auto", "device": "cpu"}, **HUB_POOLS})
    with pytest.raises(ConfigError, match="rollwright model fetch smollm2"):
        settle_model(config)


@pytest.mark.parametrize(
    "name", ["models/lak", "./lak", "/nowhere/lak", "a/b/c", "lak", "~/lak", "lake.safetensors"]
)
def test_a_mistyped_folder_is_told_at_once_and_never_asked_of_a_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("lake", "models/lake"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.json").write_text("{}")
    monkeypatch.setattr(model_choice, "download", lambda *words, **more: pytest.fail("a request was made"))
    config = build({"policy": {"kind": "torch", "model": name}})
    with pytest.raises(ConfigError, match="no such folder") as caught:
        settle_model(config)
    if name in ("models/lak", "./lak", "lak"):
        assert "did you mean" in str(caught.value)
