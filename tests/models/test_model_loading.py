"""Finding, loading and checking models on this machine."""

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from rollwright.cache import CACHE_VARIABLE
from rollwright.errors import ConfigError, FormatError
from rollwright.models import load_model, load_tokenizer, model_folder, weights_checksum
from rollwright.models.tiny import TURN_END, tiny_llama, tiny_tokenizer

TEXTS = ["You are on a frozen lake. Which way do you go?", "<answer>Up</answer>", "ÄÖÜ ß 你好"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    tokenizer = tiny_tokenizer(TEXTS, 300)
    tiny_llama(len(tokenizer), hidden_size=16, layers=1, seed=3).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def test_a_model_is_loaded_from_its_folder_as_it_was_saved(folder: Path) -> None:
    loaded = load_model(folder)
    tokenizer = load_tokenizer(folder)
    expected = tiny_llama(len(tokenizer), hidden_size=16, layers=1, seed=3).state_dict()
    assert not loaded.training
    assert all(torch.equal(expected[name], each) for name, each in loaded.state_dict().items())
    assert load_model(str(folder), dtype="bfloat16").dtype is torch.bfloat16


def test_the_tiny_tokenizer_is_lossless_and_speaks_chat(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    for text in [*TEXTS, "never seen: \x00 🧊\n"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Up?"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == f"<|im_start|>user\nUp?{TURN_END}\n<|im_start|>assistant\n"
    assert tokenizer.encode(TURN_END) == [tokenizer.eos_token_id]


def test_tiny_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = tiny_llama(50, hidden_size=16, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    two, other = tiny_llama(50, hidden_size=16, seed=1), tiny_llama(50, hidden_size=16, seed=2)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(one.state_dict()[name], two.state_dict()[name])
    assert not torch.equal(one.state_dict()[name], other.state_dict()[name])


def test_what_cannot_be_loaded_is_one_line_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="run `rollwright model fetch smollm2`"):
        load_model("smollm2")
    with pytest.raises(
        ConfigError, match=r"no such folder \(.*\); did you mean `smollm2`\? accepted: a folder"
    ):
        load_tokenizer("smollm")
    with pytest.raises(ConfigError, match="no such folder"):
        load_model(tmp_path / "nowhere")
    for load in (load_model, load_tokenizer):
        with pytest.raises(
            ConfigError, match=r"cannot be loaded: the folder has no config\.json, which every model has"
        ):
            load(tmp_path)


def test_a_damaged_model_is_one_line(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no such type"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_an_unknown_number_format_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype: 'int4' is unknown; accepted: float32"):
        load_model(folder, dtype="int4")


def test_a_fetched_model_is_found_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(folder.parent))
    model_folder("smollm2").parent.mkdir()
    folder.rename(model_folder("smollm2"))
    assert load_model("smollm2").config.hidden_size == 16


@pytest.mark.parametrize(("variable", "expected"), [(None, "1"), ("2", "2")])
def test_torch_has_one_thread_unless_the_environment_says_otherwise(
    folder: Path, variable: str | None, expected: str
) -> None:
    code = "import sys, torch; from rollwright.models import load_model; load_model(sys.argv[1])"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if variable:
        environment["OMP_NUM_THREADS"] = variable
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(torch.get_num_threads())", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected


def test_the_checksum_is_of_the_weights_alone_and_sees_every_byte(folder: Path) -> None:
    file = folder / "model.safetensors"
    first = weights_checksum(folder)
    assert first == sha256(file.read_bytes()).hexdigest()
    (folder / "notes.txt").write_text("hello")
    assert weights_checksum(folder) == first
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert weights_checksum(folder) != first
    with pytest.raises(FormatError, match=r"holds no \*.safetensors"):
        weights_checksum(folder.parent)
