"""What is wrong with a run's settings is told without making the run, in the line that making it would tell."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollwright.cli.main import app
from rollwright.config import build
from rollwright.errors import ConfigError
from rollwright.run.checks import check_config
from rollwright.run.run import Run

GOOD: dict[str, Any] = {
    "name": "lake",
    "policy": {"kind": "oracle"},
    "train_env_manager": {"num_env_groups": 1, "group_size": 2, "tags": ["FrozenLake"]},
}

TEAM = {
    "kind": "loop",
    "acts": "player",
    "agents": {"player": {"prompt": "{observation}", "policy": "other"}},
}

WRONG: dict[str, dict[str, Any]] = {
    "nothing to play": {"train_env_manager": None},
    "an unknown tag": {"train_env_manager": {"num_env_groups": 1, "group_size": 2, "tags": ["FrozenLaek"]}},
    "an unknown setting of an environment": {"custom_envs": {"FrozenLake": {"env_config": {"sise": 4}}}},
    "a level that nobody has": {
        "train_env_manager": {**GOOD["train_env_manager"], "curriculum": {"levels": 2}},
    },
    "a filter that cannot be imported": {
        "train_env_manager": {**GOOD["train_env_manager"], "group_filter": "no_such_module:keep"},
    },
    "a model that is nowhere": {"policy": {"kind": "torch", "model": "models/none"}},
    "an agent whose policy has no entry": {"orchestras": {"FrozenLake": TEAM}},
    "an agent that is trained with a policy of its own": {
        "orchestras": {"FrozenLake": TEAM},
        "policies": {"other": {"kind": "random"}},
        "training": {},
    },
    "tools for a policy of plain text": {
        "orchestras": {
            "FrozenLake": {
                **TEAM,
                "agents": {"player": {"prompt": "{observation}", "tools": ["calculator"]}},
            }
        },
        "policy": {"kind": "openai", "api": "completions", "base_url": "http://127.0.0.1:1", "model": "m"},
    },
}


def told(call: Any) -> str:
    with pytest.raises(ConfigError) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG.keys())
def test_a_check_says_what_making_the_run_would_say(changes: dict[str, Any]) -> None:
    config = build({**GOOD, **changes})
    assert told(lambda: check_config(config)) == told(lambda: Run(config))


def test_an_address_that_ray_has_not_is_told_like_any_other_setting() -> None:
    pytest.importorskip("ray")
    config = build(GOOD)
    assert told(lambda: check_config(config, ray="ray://x:1")) == told(lambda: Run(config, ray="ray://x:1"))


def test_settings_that_are_well_pass() -> None:
    check_config(build(GOOD))


def test_a_check_loads_no_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    code = f"""
import sys
from rollwright.config import build
from rollwright.run.checks import check_config
check_config(build({{**{GOOD!r}, "policy": {{"kind": "torch", "model": "model"}}}}))
print("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]


@pytest.mark.parametrize(
    "words", [["run", "lake.yaml"], ["resume", "runs/lake", "max_steps=2"]], ids=" ".join
)
def test_a_run_loads_its_model_once(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    import rollwright.engines.torch as torch_policies
    from rollwright.models.tiny import tiny_llama, tiny_tokenizer

    tokenizer = tiny_tokenizer(["Which way do you go?"], 300)
    tiny_llama(len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "lake.yaml").write_text(
        "policy: {kind: torch, model: model}\n"
        "train_env_manager: {num_env_groups: 1, group_size: 1, tags: [FrozenLake]}\n"
        "custom_envs: {FrozenLake: {max_steps: 1, max_tokens_per_step: 4}}\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    if words[0] == "resume":
        assert CliRunner().invoke(app, ["run", "lake.yaml"]).exit_code == 0
    loads: list[str] = []
    load = torch_policies.load_policy

    def counted(settings: Any, *more: Any, **named: Any) -> Any:
        loads.append(settings.model)
        return load(settings, *more, **named)

    monkeypatch.setattr(torch_policies, "load_policy", counted)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert loads == ["model"]
