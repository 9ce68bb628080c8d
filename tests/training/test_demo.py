"""What the shipped trainings do: levels kept apart, base models that know no more than they should, what a run leaves behind."""

import importlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from rollwright.cli.report import _sampled, report
from rollwright.cli.train import train
from rollwright.envs.games.frozen_lake import FrozenLake, read_lake
from rollwright.envs.games.sokoban import read_level
from rollwright.envs.splits import LevelSplit, Part
from rollwright.errors import RollwrightError
from rollwright.models import load_model, load_tokenizer
from rollwright.observe.training_report import CURVE, PAGE, report_of
from rollwright.run.folder import RunReader
from rollwright.run.training_record import FIGURES

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "frozen_lake_train.yaml"
BASE_MODEL = ROOT / "models" / "frozen_lake"
SMALL = (
    "max_steps=2",
    "train_env_manager.num_env_groups=4",
    "rollout_batch_size=32",
    "val_env_manager.num_env_groups=48",
)


def command(function: Any, *words: str | Path) -> str:
    app = typer.Typer()
    app.command()(function)
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    command(train, CONFIG, f"policy.model={BASE_MODEL}", *SMALL, "--runs", runs)
    return runs / "frozen_lake_train"


def parts_played(run: Path, part_of: Callable[[str], Part | None]) -> dict[str, set[Part | None]]:
    parts: dict[str, set[Part | None]] = {}
    for each in RunReader(run).trajectories():
        parts.setdefault(each.tag, set()).add(part_of(each.observation))
    return parts


def test_no_lake_that_is_validated_on_was_trained_on_whichever_way_it_is_turned(run: Path) -> None:
    played = parts_played(run, lambda board: read_lake(board).part(4, LevelSplit.STRUCTURE))
    assert played == {"Lake": {Part.TRAIN}, "HeldOutLake": {Part.HELD_OUT}, "HeldOutDetour": {Part.HELD_OUT}}


def test_no_room_that_is_validated_on_was_trained_on_whichever_way_it_is_turned(tmp_path: Path) -> None:
    config, model = ROOT / "configs" / "sokoban_train.yaml", ROOT / "models" / "sokoban"
    command(train, config, f"policy.model={model}", *SMALL, "--runs", tmp_path)
    played = parts_played(tmp_path / "sokoban_train", lambda board: read_level(board).room.part())
    assert played == {"Room": {Part.TRAIN}, "HeldOutRoom": {Part.HELD_OUT}}


def test_base_models_are_cloned_from_levels_to_train_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "models")
    lakes = importlib.import_module("make_frozen_lake").lakes()
    assert {lake.part(4) for lake in islice(lakes, 500)} == {Part.TRAIN}
    states = importlib.import_module("make_sokoban").states()
    assert {room.part() for room, _, _ in islice(states, 500)} == {Part.TRAIN}


def test_the_report_leaves_a_curve_and_a_page_with_the_same_levels_before_and_after(run: Path) -> None:
    said = command(report, run, "--levels", "16")
    for player in ("random player", "base model", "trained model", "oracle"):
        assert player in said
    assert (run / CURVE).read_bytes().startswith(b"\x89PNG")
    page = (run / PAGE).read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert "http" not in page, "one file that needs nothing else"
    found = report_of(RunReader(run))
    assert [step for step, _ in found.greedy] == [0, 2]
    assert len(found.sampled) == 2
    assert found.pairs
    assert [each.tag for each in found.solved] == ["HeldOutDetour", "HeldOutLake"]
    assert all(0 < each.boards <= each.levels == 24 for each in found.solved)
    assert "distinct boards solved" in said
    assert "Distinct boards solved" in page
    for pair in found.pairs:
        assert (pair.before.tag, pair.before.seed) == (pair.after.tag, pair.after.seed)
        assert pair.before.observation == pair.after.observation
        assert f"level {pair.before.seed}" in page


async def test_an_asynchronous_run_is_reported_on_the_same_levels_as_a_synchronous_one(run: Path) -> None:
    config = RunReader(run).config
    ahead = config.model_copy(update={"async_generation_ratio": 1.0})
    found = [await _sampled(each, 64, None) for each in (config, ahead)]
    assert found[0] == found[1]


def test_a_run_without_validation_is_told_what_is_missing(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    (tmp_path / FIGURES).mkdir()
    with pytest.raises(RollwrightError, match="has no validation to report; set val_env_manager"):
        command(report, tmp_path)


async def test_the_base_model_steps_onto_a_hole_as_readily_as_onto_ice() -> None:
    """So a trained model that stays out of them has learned to."""
    model, tokenizer = load_model(BASE_MODEL), load_tokenizer(BASE_MODEL)
    moves = [tokenizer.convert_tokens_to_ids(name) for name in FrozenLake.action_names]
    env = FrozenLake(p=0.75, min_distance=3, max_steps=16, part=Part.HELD_OUT)
    boards = [(await env.reset(seed)).observation for seed in range(400)]
    ids = [tokenizer.encode(f"<board>{board}<move>", add_special_tokens=False) for board in boards]
    with torch.no_grad():
        chances = model(input_ids=torch.tensor(ids)).logits[:, -1].softmax(-1)[:, moves]
    steps: dict[str, list[float]] = {"_": [], "O": []}
    for board, odds in zip(boards, chances.tolist(), strict=True):
        rows, lake = board.split(), read_lake(board)
        (row, column), goal = divmod(lake.start, 4), divmod(lake.goal, 4)
        for chance, (down, right) in zip(odds, ((0, -1), (1, 0), (0, 1), (-1, 0)), strict=True):
            if (goal[0] - row) * down > 0 or (goal[1] - column) * right > 0:
                steps.setdefault(rows[row + down][column + right], []).append(chance)
    onto_ice, onto_holes = mean(steps["_"]), mean(steps["O"])
    assert len(steps["O"]) > 50
    assert onto_ice > 0.4, "it walks to the goal"
    assert onto_holes == pytest.approx(onto_ice, abs=0.05)
