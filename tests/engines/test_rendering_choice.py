"""Which renderer a tokenizer gets, and that nothing heavy is imported before one is made."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollwright.engines.rendering import PackageRenderer, TemplateRenderer, load_tokenizer, make_renderer
from rollwright.engines.settings import RendererConfig
from rollwright.errors import ConfigError
from rollwright.models.tiny import tiny_tokenizer
from rollwright.trajectory import Message

QWEN3 = [
    "<|endoftext|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]


def tokenizer(name: str = "") -> Any:
    made: Any = tiny_tokenizer(["user assistant system go left"], 300)
    made.add_tokens(QWEN3, special_tokens=True)
    made.name_or_path = name
    return made


def test_a_model_that_the_package_knows_by_name_gets_its_renderer() -> None:
    assert isinstance(make_renderer(tokenizer("Qwen/Qwen3-8B")), PackageRenderer)


@pytest.mark.parametrize("name", ["", "somebody/Qwen3-8B-tuned", "models/Qwen3-8B"])
def test_any_other_tokenizer_is_followed_by_its_template(name: str) -> None:
    assert isinstance(make_renderer(tokenizer(name)), TemplateRenderer)


def test_a_family_can_be_named_and_takes_its_options() -> None:
    made = tokenizer()
    plain, quiet = make_renderer(made, "qwen3"), make_renderer(made, "qwen3", enable_thinking=False)
    assert isinstance(plain, PackageRenderer)
    asked = [Message("user", "go")]
    assert made.decode(quiet.open(asked)) == made.decode(plain.open(asked)) + "<think>\n\n</think>\n\n"


def test_a_name_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"'quen3' does not exist \(did you mean 'qwen3'\?\); there are: auto, "
    ):
        make_renderer(tokenizer(), "quen3")


def test_options_of_the_template_reach_it() -> None:
    made = tokenizer()
    made.chat_template = made.chat_template.replace("assistant\n", "{{ mood }}assistant\n").replace(
        "{{ '<|im_start|>{{ mood }}assistant\n' }}", "<|im_start|>assistant {{ mood }}\n"
    )
    assert "assistant calm" in made.decode(make_renderer(made, mood="calm").open([Message("user", "go")]))


def test_a_tokenizer_folder_renders_as_the_tokenizer_that_was_saved(tmp_path: Path) -> None:
    made = tokenizer()
    made.save_pretrained(tmp_path)
    settings = RendererConfig(tokenizer=str(tmp_path), name="qwen3", options={"enable_thinking": False})
    renderer = make_renderer(load_tokenizer(Path(settings.tokenizer)), settings.name, **settings.options)
    asked = [Message("user", "go left")]
    assert renderer.open(asked) == make_renderer(made, "qwen3", enable_thinking=False).open(asked)


def test_a_folder_without_a_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=str(folder)) as refused:
            load_tokenizer(folder)
        assert "\n" not in str(refused.value)


def test_the_settings_need_a_tokenizer_and_know_no_other_keys(tmp_path: Path) -> None:
    assert RendererConfig(tokenizer=str(tmp_path)).name == "auto"
    with pytest.raises(ValidationError, match="tokenizer"):
        RendererConfig.model_validate({})
    with pytest.raises(ValidationError, match="family"):
        RendererConfig.model_validate({"tokenizer": str(tmp_path), "family": "qwen3"})


def test_importing_the_rendering_package_imports_nothing_heavy() -> None:
    program = (
        "import sys, rollwright.engines.rendering, rollwright.engines.settings; "
        "print([each for each in ('renderers', 'transformers', 'torch', 'jinja2', 'tokenizers') if each in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
