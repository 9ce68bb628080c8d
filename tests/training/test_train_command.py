"""`rollwright train` from a YAML file to a model that the same command line can play with."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from rollwright.cli.live import TrainingView
from rollwright.cli.profile import profile
from rollwright.cli.report import export, plot, report
from rollwright.cli.run import resume
from rollwright.cli.show import show
from rollwright.cli.swarm import status
from rollwright.cli.train import train
from rollwright.config import load
from rollwright.engines.torch import load_policy
from rollwright.errors import ConfigError
from rollwright.models.tiny import tiny_llama, tiny_tokenizer
from rollwright.run.build_training import check
from rollwright.run.folder import RunFolder
from rollwright.run.training import TrainingRun

CONFIGS = Path(__file__).parents[2] / "configs"

SETTINGS = """
name: odd
max_steps: 3
eval_steps: 2
policy: {{kind: torch, model: {model}, batch_invariant: true}}
training: {{learning_rate: 0.01, advantage: rloo, writers: [jsonl]}}
custom_envs: {{OddBytes: {{env_type: "tiny_training:OddBytes", max_steps: 2, max_tokens_per_step: 4}}}}
train_env_manager: {{num_env_groups: 2, group_size: 4, tags: [OddBytes]}}
val_env_manager: {{num_env_groups: 2, tags: [OddBytes]}}
"""


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Settings with a small model that has a tokenizer and a chat template of its own."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    tokenizer = tiny_tokenizer(["odd and even"], 300)
    model = tiny_llama(len(tokenizer), hidden_size=16, layers=1, heads=2, max_length=128)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    settings = tmp_path / "odd.yaml"
    settings.write_text(SETTINGS.format(model=tmp_path / "model"), encoding="utf-8")
    yield settings
    sys.modules.pop("tiny_training", None)


def command(*words: str | Path) -> Any:
    app = typer.Typer()
    app.command()(train)
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def profiled(folder: Path) -> str:
    app = typer.Typer()
    app.command()(profile)
    return CliRunner().invoke(app, [str(folder)]).output


def test_a_file_becomes_a_trained_model_with_its_validations_and_where_every_rollout_went(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = command(file, "seed=7", "profile_steps=2", "--runs", tmp_path / "runs")
    assert result.exit_code == 0, result.output
    assert "after step" in result.output
    assert "where every rollout went" in result.output
    for rollouts in (16, 24):  # after two steps, and at the end
        assert result.output.count(f"profile of the last {rollouts} rollouts") == 1
    assert result.output.count("verdict: ") == 2
    folder = tmp_path / "runs" / "odd"
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert [each["step"] for each in summary["training"]["validations"]] == [0, 2, 3]
    assert summary["ledger"]["delivered"] == 3 * 8 + 3 * 2
    assert summary["training"]["version"] == 3
    assert load_policy(folder / "model").renderer is not None, "the tokenizer came along"
    assert "profile of odd" in profiled(folder)
    capsys.readouterr()
    resume(folder, live=False)  # `rollwright resume` knows that this run trains
    shown = capsys.readouterr().out
    assert "this run has ended" in shown
    assert "training of odd" in shown
    finished = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert finished["training"]["weights"] == summary["training"]["weights"]
    assert finished["training"]["length_bias"] == summary["training"]["length_bias"]
    assert finished["training"]["staleness"] == summary["training"]["staleness"]


def test_what_cannot_be_trained_is_refused_before_anything_is_written(file: Path, tmp_path: Path) -> None:
    for wrong, message in (
        (["policy.kind=oracle", "training.model=x"], "policy.kind: `oracle` takes no new weights"),
        (["policy.model=nowhere"], "no such folder"),
        (["custom_envs.OddBytes.env_type=OddBites"], "OddBites"),
    ):
        with pytest.raises(Exception, match=message) as caught:
            command(file, *wrong, "--runs", tmp_path / "runs")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


async def test_the_live_view_shows_where_the_run_stands(file: Path, tmp_path: Path) -> None:
    folder, config = RunFolder.create(tmp_path / "runs", load(file))
    run = TrainingRun(config, folder)
    screen = Console(width=100, record=True, file=(tmp_path / "screen").open("w", encoding="utf-8"))
    screen.print(TrainingView(run).table())
    assert "0 of 3 · now: not started" in screen.export_text()
    await run.run()
    screen.print(TrainingView(run).table())
    shown = screen.export_text()
    for part in (
        "3 of 3 · now: done",
        "mean reward",
        "solved after 3 steps",
        "0: 100 %",
        "sampled tokens/s",
        "train ",
    ):
        assert part in shown


@pytest.mark.parametrize("served", sorted(CONFIGS.glob("train_*.yaml")), ids=lambda file: file.stem)
def test_the_training_configurations_that_come_with_the_package_are_whole(served: Path) -> None:
    check(load(served))


def test_settings_that_contradict_training_name_their_key(file: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"training.learning_rat: unknown key; did you mean `learning_rate`"
    ):
        load(file, ["training.learning_rat=1"])


def test_of_a_run_that_forgets_every_reader_says_which_steps_there_are(file: Path, tmp_path: Path) -> None:
    keeping = ("training.keep_steps=2", "training.checkpoint_steps=1", "training.keep_checkpoints=1")
    done = command(file, "max_steps=8", *keeping, "--runs", tmp_path)
    kept = "steps 6…7; earlier ones were removed (training.keep_steps)"
    assert done.exit_code == 0, done.output
    assert kept in done.output
    folder = str(tmp_path / "odd")
    readers: dict[Any, list[str]] = {
        show: [],
        plot: [],
        profile: [],
        export: [],
        report: ["--levels", "2"],
        status: [],
    }
    for reader, options in readers.items():
        app = typer.Typer()
        app.command()(reader)
        found = CliRunner().invoke(app, [folder, *options])
        assert found.exit_code in (0, 3), found.exception
        assert kept in found.output, reader.__name__
    page = (tmp_path / "odd" / "report.html").read_text(encoding="utf-8")
    assert kept in page
    assert "before and after" not in page, "what is left of the start is not the start"
    app = typer.Typer()
    app.command()(show)
    gone = CliRunner().invoke(app, [folder, "odd.train-g0-m0"])
    assert "has no such rollout" in str(gone.exception)
    assert kept in str(gone.exception)
    ledger = json.loads((tmp_path / "odd" / "summary.json").read_text(encoding="utf-8"))["ledger"]
    assert ledger["delivered"] >= 8 * 8, "what was forgotten is still counted"
