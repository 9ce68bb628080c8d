"""The example that trains an unmodified agent runs as it stands, and a model learns through it."""

import ast
import json
import socket
import subprocess
import sys
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


@pytest.mark.parametrize(
    "agent",
    [
        "langgraph_agent:solve",
        "openai_agents_agent:solve",
        "pydantic_ai_agent:solve",
        f"{{command: [{sys.executable}, command_agent.py]}}",
        "{function: 'my_agent:solve', process: true}",
    ],
)
def test_programs_of_other_frameworks_run_as_they_are(tmp_path: Path, agent: str) -> None:
    few = ["max_steps=1", "train_env_manager.num_env_groups=1", "train_env_manager.group_size=2"]
    few += ["val_env_manager.num_env_groups=2", "policy.skill=1.0"]
    do("run", EXAMPLE / "config.yaml", "--runs", tmp_path, *few, f"custom_envs.Larger.agent={agent}")
    played = list(RunReader(tmp_path / "own_agent").trajectories())
    assert len(played) == 4
    assert {each.components["correct"] for each in played} == {1.0}
    trained = [each for each in played if ".train-" in each.group_id]
    assert {(len(each.turns), each.not_trainable) for each in trained} == {(1, None)}


def test_a_remote_program_plays_the_examples_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = subprocess.Popen(
        [sys.executable, str(EXAMPLE / "remote_program.py"), f"http://127.0.0.1:{port}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        few = [f"remote.port={port}", "max_steps=1", "val_env_manager.num_env_groups=2"]
        do("run", EXAMPLE / "config.yaml", "--runs", tmp_path, *few, "custom_envs.Larger.agent=remote")
        assert len(list(RunReader(tmp_path / "own_agent").trajectories())) == 18
    finally:
        program.kill()
        program.communicate()


@pytest.mark.parametrize(
    "name", ["langgraph_agent", "openai_agents_agent", "pydantic_ai_agent", "remote_program"]
)
def test_at_most_fifteen_lines_are_added_to_a_program(name: str) -> None:
    tree = ast.parse((EXAMPLE / f"{name}.py").read_text(encoding="utf-8"))
    added = [
        node
        for node in tree.body
        if (isinstance(node, ast.AsyncFunctionDef) and node.name == "solve") or isinstance(node, ast.If)
    ]
    (own,) = added
    assert (own.end_lineno or 0) - own.lineno + 1 <= 15


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
