"""What filters caught can be looked at: each by its name, with an example that opens."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollwright.cli.main import app
from rollwright.rollout.filters import Catches, build_filters, judge, judge_group
from rollwright.run.folder import RunReader
from rollwright.trajectory import Trajectory

CONFIG = """
name: caught
max_steps: 3
policy: {kind: simulated, skill: 0.6, tokens_per_second: 100000}
strategy: {kind: tree, width: 2, depth: 3}
limits: {max_refills: 1000}
train_env_manager:
  num_env_groups: 4
  group_size: 2
  tags: [FrozenLake, SimpleSokoban]
  filters:
    - {kind: void_turn, action: mask}
    - {kind: format_error}
    - {kind: overlong, limit: 460, baseline: false}
    - {kind: repetition, action: drop, ratio: 1.3, shortest: 110}
    - zero_variance
"""
FILTERS = ("void_turn", "format_error", "overlong", "repetition", "zero_variance")


def rollwright(*words: str | Path) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filters")
    (folder / "caught.yaml").write_text(CONFIG, encoding="utf-8")
    rollwright("run", folder / "caught.yaml", "--runs", folder, "--no-live")
    return folder / "caught"


@pytest.fixture(scope="module")
def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", FILTERS)
def test_show_names_what_each_filter_caught_and_its_example_opens(
    name: str, run: Path, summary: dict[str, Any]
) -> None:
    overview = rollwright("show", run)
    found = re.search(rf"filter {name}, for example (\S+) .*?([\d,]+) ", overview)
    assert found is not None, overview
    assert summary["filters"][name] == {"count": int(found[2].replace(",", "")), "example": found[1]}
    opened = rollwright("show", run, found[1])
    assert found[1] in opened
    assert f"filter {name}" in opened


def test_an_example_says_what_followed_from_it(run: Path, summary: dict[str, Any]) -> None:
    says = {
        "void_turn": "out of the loss: void_turn",
        "overlong": "out of the loss, and out of the baseline: overlong",
        "repetition": "replaced by another rollout, because of filter repetition",
        "zero_variance": "the whole group is left out, because of filter zero_variance",
    }
    for name, words in says.items():
        opened = rollwright("show", run, summary["filters"][name]["example"])
        assert words in " ".join(opened.replace("│", " ").split()), opened  # lines of a tree are wrapped


TWINS = """
name: twins
policy: {kind: simulated, skill: 1.0, tokens_per_second: 100000, spread: 0.0}
train_env_manager:
  num_env_groups: 2
  group_size: 12
  tags: [FrozenLake]
  filters: [{kind: duplicate, action: mask}, {kind: accuracy_band, high: 0.5, action: count}]
"""
"""Perfect play, with answers of one length: who takes the same way as another is its duplicate."""


def test_a_member_that_was_caught_beside_the_others_says_so(tmp_path: Path) -> None:
    (tmp_path / "twins.yaml").write_text(TWINS, encoding="utf-8")
    rollwright("run", tmp_path / "twins.yaml", "--runs", tmp_path, "--no-live")
    run = tmp_path / "twins"
    caught = json.loads((run / "summary.json").read_text(encoding="utf-8"))["filters"]
    for group in (each for row in RunReader(run).metrics() for each in row["groups"]):
        first = rollwright("show", run, f"{group}-m0")
        assert "caught by filter accuracy_band, beside the others of its group" in first
        assert "duplicate" not in first  # the earliest of them is none, whoever ended first
        assert "for example" in rollwright("show", run, group)
    example = caught["duplicate"]["example"]
    opened = rollwright("show", run, example)
    assert "caught by filter duplicate, beside the others of its group" in opened
    assert "out of the loss: duplicate" in opened
    assert f"for example {example}" in rollwright("show", run, example.rpartition("-")[0])


def recounted(run: Path) -> dict[str, int]:
    """What the run's filters catch among the trajectories that it left."""
    reader = RunReader(run)
    filters = build_filters(reader.config.train_env_manager)
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in sorted(reader.trajectories(), key=lambda each: each.rollout_id):
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    catches = Catches()
    for group in groups.values():
        judged = [judge(filters, each, catches) for each in group]
        kept = [each.trajectory for each in judged if each.dropped is None]
        if len(kept) == 2:  # complete
            judge_group(filters, kept, catches)
    return {name: catch.count for name, catch in catches.by_filter.items()}


def test_a_run_that_was_killed_and_gone_on_with_says_what_filters_caught_before(tmp_path: Path) -> None:
    """6 batches, killed without a word after the second; D3."""
    slow = CONFIG.replace("tokens_per_second: 100000", "tokens_per_second: 1200")
    (tmp_path / "caught.yaml").write_text(slow.replace("max_steps: 3", "max_steps: 6"), encoding="utf-8")
    command = [sys.executable, "-m", "rollwright", "run", "caught.yaml", "--runs", ".", "--no-live"]
    folder = tmp_path / "caught"
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        give_up = time.monotonic() + 120
        while not (folder / "metrics.jsonl").is_file() or len(RunReader(folder).metrics()) < 2:
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < give_up
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    assert len(RunReader(folder).metrics()) < 6, "killed too late"
    rollwright("resume", folder, "--no-live")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert {name: catch["count"] for name, catch in summary["filters"].items()} == recounted(folder)
    assert set(summary["filters"]) == set(FILTERS)
    delivered = [group for row in RunReader(folder).metrics() for group in row["groups"]]
    assert summary["ledger"]["delivered"] == 2 * len(delivered)
