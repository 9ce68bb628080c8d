"""No shipped training has a held-out item in what it trained on, as its log says."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rollwright.cli.run import run
from rollwright.config import load
from rollwright.envs.games.frozen_lake import read_lake
from rollwright.envs.games.sokoban import read_level
from rollwright.envs.splits import views
from rollwright.run.folder import RunReader

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


def numbers(text: str) -> object:
    """Two numbers are the same question in any order and with anything asked of them."""
    return frozenset(re.findall(r"\d+", text))


def lake(board: str) -> object:
    """A board is the same whichever way it is turned, wherever its player stands."""
    found, size = read_lake(board), len(board.split())
    return min(views(size, size, (found.goal,), found.holes))


def room(board: str) -> object:
    """A room is the same whichever way it is turned, wherever its boxes and its player stand."""
    found = read_level(board).room
    stride = found.width + 1
    floor = [cell - cell // stride for cell, is_open in enumerate(found.is_open) if is_open]
    targets = [cell - cell // stride for cell in found.targets]
    return min(views(len(found.is_open) // stride, found.width, targets, floor))


ITEMS: dict[str, Callable[[str], object]] = {
    "frozen_lake_train": lake,
    "smollm2_calculator": numbers,
    "smollm2_frozen_lake": lake,
    "smollm2_larger_number": numbers,
    "smollm2_larger_number_lora": numbers,
    "sokoban_train": room,
    "swarm_frozen_lake": lake,
}
"""What makes two questions the same item, by configuration."""

NO_CLAIM = {"smollm2_basic_arithmetic", "train_served"}
"""Their levels are not parted. The first draws questions of a generator by seed, and its page counts those that were trained on,
too; the second shows how a served engine is trained, and no page has a figure of it."""


def test_every_shipped_training_with_validation_is_looked_at() -> None:
    trainings = {
        file.stem
        for file in CONFIGS.glob("*.yaml")
        if (found := load(file)).training is not None and found.val_env_manager is not None
    }
    assert trainings == set(ITEMS) | NO_CLAIM


@pytest.mark.parametrize("name", sorted(ITEMS))
def test_the_log_of_a_training_has_no_held_out_item_among_what_was_trained_on(
    name: str, tmp_path: Path
) -> None:
    app = typer.Typer()
    app.command()(run)
    words = [
        CONFIGS / f"{name}.yaml",
        "policy={kind: simulated, skill: 0.5, tokens_per_second: 1000000}",
        "training=null",
        "max_steps=6",
        "eval_steps=3",
        "--runs",
        tmp_path,
        "--no-live",
    ]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    reader = RunReader(tmp_path / load(CONFIGS / f"{name}.yaml").name)
    validated = {group for row in reader.metrics() if row["mode"] == "val" for group in row["groups"]}
    trained: set[Any] = set()
    held_out: set[Any] = set()
    for each in reader.trajectories():
        items = held_out if each.group_id in validated else trained
        items.add(ITEMS[name](each.observation or each.opening[-1].content))
    assert len(trained) > 5
    assert len(held_out) > 3
    assert not trained & held_out


def test_the_held_out_pairs_of_numbers_are_in_no_other_row() -> None:
    rows, other = (
        [json.loads(line) for line in (CONFIGS / "tasks" / file).read_text(encoding="utf-8").splitlines()]
        for file in ("larger_number_held_out.jsonl", "larger_number.jsonl")
    )
    pairs = [numbers(row["question"]) for row in rows]
    assert len(set(pairs)) == len(rows) == 256
    assert not set(pairs) & {numbers(row["question"]) for row in other}
    assert all(max(map(int, re.findall(r"\d+", row["question"]))) == int(row["answer"]) for row in rows)
