"""Rewards computed again from stored trajectories: nothing is played, nothing stored is changed."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from rollwright.cli.main import app
from rollwright.run.folder import RunReader
from rollwright.run.rescoring import RESCORED

LAST_WORD = {"kind": "exact_match", "extract": r"(\S+)\s*$"}


def verdict(answer: str) -> float:
    return 0.5


def fails(answer: str) -> float:
    raise ValueError("cannot say")


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))
    module = ModuleType("rescoring_rewards")
    module.verdict, module.fails = verdict, fails  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rescoring_rewards", module)


def do(*words: Any, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == code, (done.output, done.exception)
    return " ".join(done.output.split())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has ended."""
    rows = [{"question": f"{n} + 1 = ?", "answer": n + 1} for n in range(12)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    named = {"kind": "function", "function": "rescoring_rewards:verdict", "name": "judge", "weight": 2.0}
    settings = {
        "name": "sums",
        "custom_envs": {"Sums": {"tasks": "sums.jsonl", "held_out": 0.4, "rewards": [LAST_WORD, named]}},
        "policy": {"kind": "simulated", "skill": 0.5, "tokens_per_second": 1e5, "mean_tokens": 3},
        "train_env_manager": {"num_env_groups": 4, "group_size": 4, "tags": ["Sums"]},
        "val_env_manager": {"num_env_groups": 2, "tags": ["Sums"]},
    }
    (tmp_path / "sums.yaml").write_text(json.dumps(settings), encoding="utf-8")
    do("run", tmp_path / "sums.yaml", "--runs", tmp_path / "runs")
    return tmp_path / "runs" / "sums"


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / RESCORED).read_text().splitlines()]


def log_of(run: Path) -> bytes:
    return b"".join(each.to_bytes() for each in RunReader(run).trajectories())


def test_the_same_rewards_give_the_same_values_and_change_nothing_that_is_stored(run: Path) -> None:
    before = log_of(run)
    said = do("rescore", run)
    rows = rows_of(run)
    assert len(rows) == 18
    assert {row["mode"] for row in rows} == {"train", "val"}
    for row in rows:
        assert (row["before"], row["components_before"]) == (row["after"], row["components_after"])
    assert log_of(run) == before
    assert "train Sums judge 0.500 0.500 0" in said


def test_other_rewards_are_shown_beside_the_old_ones(run: Path) -> None:
    said = do(
        "rescore", run, 'custom_envs.Sums.rewards=[{kind: length, limit: 0, ramp: 1, name: "exact_match"}]'
    )
    for row in rows_of(run):
        assert row["components_after"] == {"exact_match": -1.0}
        assert row["after"] == -1.0
    assert "train Sums judge 0.500 – 16" in said


def test_a_judge_is_not_asked_but_its_stored_verdict_counts_with_the_new_weight(run: Path) -> None:
    do("rescore", run, "custom_envs.Sums.rewards=[{kind: judge, rubric: r, weight: 10}]")
    assert {row["after"] for row in rows_of(run)} == {5.0}
    said = do("rescore", run, "custom_envs.Sums.rewards=[{kind: judge, rubric: r, name: other}]", code=1)
    assert "18 could not be judged, first sums." in said
    assert "reward other: asks a model, which rescoring does not, and no value of it is stored" in said


def test_a_reward_that_fails_is_told_and_not_a_0(run: Path) -> None:
    said = do("rescore", run, 'custom_envs.Sums.rewards=["rescoring_rewards:fails"]', code=1)
    assert "reward fails: raised ValueError: cannot say" in said
    assert {row["after"] for row in rows_of(run)} == {None}


def test_rows_that_were_changed_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"question": "q", "answer": 1}\n' * 12, encoding="utf-8")
    done = CliRunner().invoke(app, ["rescore", str(run)])
    assert "are not those that the run was begun with" in str(done.exception)
    assert not (run / RESCORED).exists()
