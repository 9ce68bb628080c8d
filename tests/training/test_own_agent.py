"""The example that trains an unmodified agent runs as it stands, and a model learns through it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollwright.cli.main import app
from rollwright.config import load
from rollwright.models.tiny import tiny_llama, tiny_tokenizer
from rollwright.run.checks import check_config
from rollwright.run.folder import RunReader

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_own_agent"

DIGITS = '''
def digits(answer):
    """The share of the answer's characters that are digits."""
    return sum(each.isdigit() for each in answer) / max(len(answer), 1)
'''


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = tiny_tokenizer(["0123456789", "Compare 47 and 12."], vocabulary_size=270)
    tiny_llama(len(tokenizer), hidden_size=32, layers=1, heads=2, max_length=512).save_pretrained(
        tmp_path / "m"
    )
    tokenizer.save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def do(*words: Any) -> str:
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_the_example_runs_with_the_simulated_engine(tmp_path: Path) -> None:
    said = do("run", EXAMPLE / "config.yaml", "--runs", tmp_path)
    assert "Larger" in said
    played = list(RunReader(tmp_path / "own_agent").trajectories())
    assert len(played) == 48
    assert {tuple(each.components) for each in played} == {("correct", "length")}
    assert 0.4 < sum(each.components["correct"] for each in played) / 48 < 1.0


def test_the_examples_training_settings_are_accepted(model: Path) -> None:
    check_config(load(EXAMPLE / "train.yaml", [f"policy.model={model}", "policy.renderer=template"]))


def test_a_model_learns_through_an_agent_with_an_unmodified_sdk(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digit_rewards.py").write_text(DIGITS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    do(
        *("train", EXAMPLE / "train.yaml", "--runs", tmp_path / "runs"),
        *(f"policy.model={model}", "policy.renderer=template", "policy.device=cpu"),
        *("training.learning_rate=0.02", "training.device=cpu", "max_steps=12", "eval_steps=12"),
        *("train_env_manager.num_env_groups=4", "val_env_manager.num_env_groups=8"),
        'custom_envs.Larger.rewards=["digit_rewards:digits"]',
    )
    reader = RunReader(tmp_path / "runs" / "own_agent_smollm2")
    rewards = {(row["mode"], row["step"]): row["reward"] for row in reader.metrics()}
    assert rewards["val", 12] >= rewards["val", 0] + 0.3
    assert rewards["train", 11] > rewards["train", 0]
    summary = json.loads((reader.path / "summary.json").read_text())
    assert not summary.get("left_out")
    sampled = {each.rollout_id: each.sampled_tokens for each in reader.trajectories()}
    assert all(sampled.values())
