"""Trees as people see them: drawn by `show`, and as pictures by `plot`."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from rollwright.cli.main import app
from rollwright.cli.trajectory_view import tokens_saved, tree_view
from rollwright.config import build
from rollwright.errors import RollwrightError
from rollwright.observe import plots
from rollwright.observe.plots import draw, picture_of
from rollwright.run.folder import RunReader
from rollwright.training.advantages import TurnTree
from rollwright.training.advantages.tree import turn_values
from rollwright.trajectory import Outcome, Trajectory, Turn, leaves, path, token_ids

CONFIG = """
max_steps: 3
policy: {kind: simulated, skill: 0.6, tokens_per_second: 100000}
strategy: {kind: tree, width: 2, depth: 3}
train_env_manager: {num_env_groups: 2, group_size: 2, tags: [FrozenLake], filters: [format_error]}
val_env_manager: {num_env_groups: 2, tags: [FrozenLake]}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trees")
    (folder / "lake.yaml").write_text(CONFIG, encoding="utf-8")
    command("run", folder / "lake.yaml", "--runs", folder, "--no-live")
    return folder / "lake"


def command(*words: str | Path) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def turn(number: int, after: int | None, action: str, reward: float = 0.0, *, ends: bool = False) -> Turn:
    outcome = Outcome("", reward, terminated=ends, action=action, success=reward > 0 if ends else None)
    ids = token_ids([1] * 10)
    return Turn(number, after, after, sampled_ids=ids, completion_tokens=10, outcome=outcome)


def drawn(trajectory: Trajectory) -> list[str]:
    screen = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    screen.print(tree_view(trajectory, TurnTree()([[trajectory]])[0][0]))
    return screen.export_text().splitlines()


def small_tree() -> Trajectory:
    turns = [
        turn(0, None, "Up"),
        turn(1, 0, "Left", 1.0, ends=True),
        turn(2, 0, "Right"),
        turn(3, 2, "Down", ends=True),
    ]
    return Trajectory("r", "a", "g", "T", 1, turns=turns)


def test_answers_that_came_out_the_same_are_drawn_once_with_their_number_and_were_paid_for() -> None:
    tree = small_tree()
    tree.turns[1] = msgspec.structs.replace(tree.turns[1], count=2)
    tree.turns[2] = msgspec.structs.replace(tree.turns[2], count=3)
    head, _, left, right = drawn(tree)
    assert "4 turns, 70 tokens sampled, 10 saved by sharing" in head
    assert "Left ×2 solved" in left
    assert "Right ×3 → Down not solved" in right


def test_a_tree_is_drawn_with_its_values_advantages_and_what_sharing_saved() -> None:
    tree = small_tree()
    head, trunk, left, right = drawn(tree)
    assert drawn(msgspec.structs.replace(tree, turns=tree.turns[:2]))[1].count("→") == 1
    assert tokens_saved(tree) == 10
    assert "2 leaves, 4 turns, 40 tokens sampled, 10 saved by sharing (20 %)" in head
    tree.metrics |= {"tree_by_replay": 1.0, "tree_replayed_steps": 3.0}
    assert "; environments copied by replay, 3 steps replayed" in " ".join(" ".join(drawn(tree)[:2]).split())
    tree.metrics |= {"tree_merged": 2.0, "tree_refused": 5.0}
    told = " ".join(" ".join(drawn(tree)[:3]).split())
    assert "; 2 answers the same as another; 5 answers not in the budget" in told
    assert "Up  V 0.5  A +0" in trunk
    assert "Left solved  V 1  A +1  weight 0.5, 10 tokens" in left
    assert "Right → Down not solved  V 0  A -1  weight 0.5, 20 tokens" in right


def test_show_draws_every_leaf_of_a_recorded_tree(run: Path) -> None:
    trees = [each for each in RunReader(run).trajectories() if len(leaves(each.turns)) > 1]
    tree = max(trees, key=lambda each: len(each.turns))
    shown = command("show", run, tree.rollout_id)
    ends = [tree.turns[leaf].outcome for leaf in leaves(tree.turns)]
    assert shown.count(" solved  V") == len(ends)
    assert shown.count(" not solved  V") == sum(not each.success for each in ends if each)
    assert f"V {turn_values(tree)[0]:.3g}" in shown
    assert "turn 1 ·" not in shown
    assert "turn 1 ·" in command("show", run, tree.rollout_id, "--turns")


def test_the_summary_says_what_trees_saved_and_what_was_left_out(tmp_path: Path) -> None:
    (tmp_path / "lake.yaml").write_text(CONFIG, encoding="utf-8")
    budget = ("strategy.budget=3", "strategy.fork=replay")
    told = command("run", tmp_path / "lake.yaml", *budget, "--runs", tmp_path, "--no-live")
    reader = RunReader(tmp_path / "lake")
    played = [each for each in reader.trajectories() if ".train-" in each.rollout_id]
    summary = reader.summary()
    assert summary is not None
    assert summary["trees"]["leaves"] == sum(len(leaves(each.turns)) for each in played)
    assert summary["trees"]["tokens_saved"] == sum(tokens_saved(each) for each in played)
    for name, words in (
        ("leaves", "leaves of trees"),
        ("tokens_saved", "sampled tokens saved by sharing"),
        ("refused", "answers not in the budget"),
        ("replayed_steps", "steps replayed"),
    ):
        line = next(line for line in told.splitlines() if words in line)
        assert f" {summary['trees'][name]:,} " in line


def test_a_picture_has_the_figures_of_the_run(run: Path) -> None:
    reader = RunReader(run)
    picture = picture_of(reader)
    played = [each for each in reader.trajectories() if ".train-" in each.rollout_id]
    ways = [path(each.turns, leaf) for each in played for leaf in leaves(each.turns)]
    assert picture.turns.total() == len(picture.tokens) == len(ways)
    assert sum(picture.leaves.values()) == len(played) == 12
    assert sum(count * leaf for leaf, count in picture.leaves.items()) == len(ways)
    assert picture.widths[0] == 2
    assert sum(picture.widths) == pytest.approx(sum(len(each.turns) for each in played) / 12)
    assert [step for step, _ in picture.rewards["FrozenLake"]] == [0, 1, 2]
    assert [step for step, _ in picture.rewards["FrozenLake, validation"]] == [3]
    for (_, paid), (_, alone) in zip(picture.sampled_per_leaf, picture.along_path, strict=True):
        assert paid < alone


@pytest.mark.parametrize(("kind", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_plot_writes_pictures_into_the_run_folder(run: Path, kind: str, begins: bytes) -> None:
    command("plot", run, "--to", kind)
    found = {file.stem: file.read_bytes() for file in (run / "plots").glob(f"*.{kind}")}
    assert set(found) >= {"reward", "lengths", "tokens_per_leaf", "trees"}
    assert all(content.startswith(begins) and len(content) > 5_000 for content in found.values())


def test_a_run_of_chains_has_no_picture_of_trees(tmp_path: Path) -> None:
    (tmp_path / "lake.yaml").write_text(CONFIG, encoding="utf-8")
    command("run", tmp_path / "lake.yaml", "strategy.kind=chain", "--runs", tmp_path, "--no-live")
    reader = RunReader(tmp_path / "lake")
    assert (reader.summary() or {})["trees"] == {}
    picture = picture_of(reader)
    assert not picture.leaves
    assert "trees" not in {file.stem for file in draw(picture, tmp_path / "plots", "svg")}


def test_without_matplotlib_there_is_one_clear_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RollwrightError, match=r"^plot needs matplotlib: install rollwright\[dashboard\]$"):
        command("plot", run)


@pytest.mark.parametrize(("words", "says"), [(("--to", "jpg"), "known: png, svg"), ((), "no batch yet")])
def test_a_mistake_with_plot_is_one_line(words: Any, says: str, tmp_path: Path) -> None:
    from rollwright.run.folder import RunFolder

    content = {"train_env_manager": {"num_env_groups": 1, "tags": ["FrozenLake"]}}
    folder, _ = RunFolder.create(tmp_path, build(content))
    folder.finish({})
    with pytest.raises(RollwrightError, match=says) as refused:
        command("plot", folder.path, *words)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", [0.9, 0.0, -0.4, 120.0])
def test_a_run_of_one_batch_has_whole_batches_and_a_height_on_its_axes(value: float) -> None:
    from matplotlib.figure import Figure

    axis = Figure().subplots()
    plots._lines(axis, "reward", "batch", "mean reward", {"FrozenLake": [(0, value)]})
    shown = [tick for tick in axis.get_xticks() if axis.get_xlim()[0] <= tick <= axis.get_xlim()[1]]
    assert shown == [0]
    low, high = axis.get_ylim()
    assert low <= min(0.0, value) <= max(0.0, value) < high or value < 0 == high
    bars = Figure().subplots()
    plots._bars(bars, "episode lengths", "turns in a path", "paths", {3: 40})
    assert all(float(tick).is_integer() for tick in bars.get_xticks())
