"""What filters caught can be looked at: each by its name, with an example that opens."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollwright.cli.main import app

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
