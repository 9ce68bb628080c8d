"""A recorded run trains again without an engine, to the same weights; and the command that does it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rollwright.cli.train import train
from rollwright.errors import ConfigError, FormatError, RollwrightError
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.training import TrainingRun
from rollwright.training.advantages import GRPO
from rollwright.training.rows import NotTrainable, build_rows


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import tiny_training

    yield tiny_training
    sys.modules.pop("tiny_training")


@pytest.fixture
async def recorded(tiny: Any, tmp_path: Path) -> TrainingRun:
    """An asynchronous run: its batches are in an order of their own."""
    model = tiny.save_model(tmp_path / "model")
    config = tiny.configuration(model, max_steps=5, async_generation_ratio=1)
    run: TrainingRun = await tiny.train(tmp_path / "recorded", config, model)
    return run


def command(*words: str | Path) -> Any:
    """`rollwright train …`, with exceptions as they come."""
    app = typer.Typer()
    app.command()(train)
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


async def test_a_recorded_run_trains_to_the_same_weights_without_an_engine(
    tiny: Any, recorded: TrainingRun, tmp_path: Path
) -> None:
    source = recorded.folder.path
    config = recorded.config.model_copy(
        update={"training": recorded.training.model_copy(update={"from_run": str(source)})}
    )
    folder, config = RunFolder.create(tmp_path / "again", config)
    run = TrainingRun(config, folder)
    await run.run()
    assert run.local is None
    assert run.checksum == recorded.checksum
    assert RunReader(folder.path).metrics() == RunReader(source).metrics()


async def test_what_the_filters_left_out_is_left_out_again(tiny: Any, tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model")
    config = tiny.configuration(
        model,
        "train_env_manager.filters=[{kind: format_error, action: drop}, {kind: accuracy_band, high: 0.8, action: mask}]",
        max_steps=5,
    )
    run = await tiny.train(tmp_path / "runs", config, model)
    caught = run.local.schedulers[0].ledger.catches.by_filter
    assert {"format_error", "accuracy_band"} <= set(caught), "the filters have something to do"
    again = tiny.configuration(model, f"training.from_run={run.folder.path}", max_steps=5)
    assert (await tiny.train(tmp_path / "again", again, model)).checksum == run.checksum


def test_the_command_trains_on_a_run_and_goes_on_where_it_stopped(
    tiny: Any, recorded: TrainingRun, tmp_path: Path
) -> None:
    source, runs = recorded.folder.path, tmp_path / "runs"
    first = command("--from-run", source, "max_steps=3", "training.checkpoint_steps=2", "--runs", runs)
    assert first.exit_code == 0, first.output
    assert "training of tiny" in first.output
    summary = json.loads((runs / "tiny" / "summary.json").read_text(encoding="utf-8"))
    assert summary["training"]["steps"] == 3
    assert summary["error"] is None

    # as if it had been killed in its third step, and asked for more
    folder = runs / "tiny"
    settings = (folder / "config.yaml").read_text(encoding="utf-8")
    (folder / "config.yaml").write_text(settings.replace("max_steps: 3", "max_steps: 5"), encoding="utf-8")
    last = folder / "checkpoints" / "000003"
    last.rename(folder / "checkpoints" / ".000003.partial")
    second = command("--resume", folder)
    assert second.exit_code == 0, second.output
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["training"]["weights"] == recorded.checksum
    steps = [
        json.loads(line)["step"] for line in (folder / "training" / "metrics.jsonl").open(encoding="utf-8")
    ]
    assert steps == list(range(5))


def test_a_recorded_run_is_trained_as_it_was_sampled_or_not_at_all(
    recorded: TrainingRun, tmp_path: Path
) -> None:
    source = recorded.folder.path
    with pytest.raises(
        ConfigError, match=r"sampling\.temperature: the recorded run was played with 1, not 0\.5"
    ):
        command("--from-run", source, "sampling.temperature=0.5", "--runs", tmp_path / "runs")
    file = source / "config.yaml"
    settings = file.read_text(encoding="utf-8")
    file.write_text(settings.replace("top_p: 1.0", "top_p: 0.9"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"sampling\.top_p: 0\.9 cuts the distribution that is trained"):
        command("--from-run", source, "--runs", tmp_path / "runs")
    with pytest.raises(ConfigError, match=r"sampling\.top_p: the recorded run was played with 0\.9, not 1"):
        command("--from-run", source, "sampling.top_p=1", "--runs", tmp_path / "runs")


def test_validations_of_a_run_are_no_training_data(tiny: Any, tmp_path: Path) -> None:
    import asyncio

    model = tiny.save_model(tmp_path / "model")
    config = tiny.configuration(
        model, max_steps=1, val_env_manager={"num_env_groups": 2, "tags": ["OddBytes"]}
    )
    run = asyncio.run(tiny.train(tmp_path / "runs", config, model))
    played = list(RunReader(run.folder.path).trajectories())
    greedy = [each for each in played if each.sampling is not None and each.sampling.temperature == 0]
    assert greedy, "it has validated"
    assert {each.not_trainable for each in greedy} == {"sampled at temperature 0"}
    with pytest.raises(NotTrainable, match="it was sampled at temperature 0"):
        build_rows([played], GRPO())


def test_a_record_without_its_trajectories_is_refused(
    tiny: Any, recorded: TrainingRun, tmp_path: Path
) -> None:
    log = recorded.folder.path / "trajectories.rwlog"
    log.write_bytes(log.read_bytes()[:2000])
    with pytest.raises(FormatError, match=r"step \d names trajectories that trajectories.rwlog lacks"):
        command("--from-run", recorded.folder.path, "--runs", tmp_path / "runs")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "CONFIG: is needed"),
        (["--from-run", "nowhere"], "nowhere: is not a run folder"),
        (["other.yaml", "--resume", "nowhere"], "is resumed with its own settings"),
        (["--resume", "nowhere"], "nowhere: is not a run folder"),
    ],
)
def test_a_command_without_anything_to_train_on_is_refused_in_one_line(
    words: list[str], message: str
) -> None:
    with pytest.raises(RollwrightError, match=message):
        command(*words)


def test_a_configuration_without_training_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    file = tmp_path / "plain.yaml"
    file.write_text("train_env_manager: {num_env_groups: 1, tags: [FrozenLake]}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="training: is not set"):
        command(file, "--runs", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
