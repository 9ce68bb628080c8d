"""A training run whose files are damaged: it says so, goes on from what is whole, and comes to the same weights."""

import asyncio
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rollwright.cli.profile import profile
from rollwright.cli.report import export
from rollwright.cli.show import show
from rollwright.errors import RollwrightError
from rollwright.observe.training_report import report_of
from rollwright.rollout.settings import TrainEnvManagerConfig
from rollwright.run.folder import RunReader
from rollwright.run.pruning import TrajectoryReleaser

COUNT = int(os.environ.get("ROLLWRIGHT_DAMAGES", "16")) // 4
FIRST_SEED = int(os.environ.get("ROLLWRIGHT_DAMAGE_SEED", "0"))
STEPS = 6


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    sys.path.insert(0, str(Path(__file__).parent))
    import tiny_training

    yield tiny_training
    sys.path.remove(str(Path(__file__).parent))
    sys.modules.pop("tiny_training", None)


@pytest.fixture(scope="module")
def model(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny.save_model(tmp_path_factory.mktemp("model") / "tiny"))


def settings(tiny: Any, model: Path) -> Any:
    training = {"model": str(model), "learning_rate": 3e-3, "checkpoint_steps": 2, "hand_over": "tensors"}
    return tiny.configuration(model, max_steps=STEPS, training=training)


@pytest.fixture(scope="module")
def whole(tiny: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that has ended, and the checksum of its weights."""
    runs = tmp_path_factory.mktemp("whole")
    run = asyncio.run(tiny.train(runs, settings(tiny, model), model))
    return run.folder.path, run.checksum


async def test_a_damaged_checkpoint_is_told_of_and_its_steps_are_trained_again_to_the_same_weights(
    tiny: Any, model: Path, whole: tuple[Path, str], tmp_path: Path
) -> None:
    path, checksum = whole
    shutil.copytree(path, tmp_path / "tiny")
    checkpoints = sorted((tmp_path / "tiny" / "checkpoints").iterdir())
    assert len(checkpoints) >= 2
    for file, place in (("model.safetensors", 900), ("state.json", 30)):
        damaged = sorted((tmp_path / "tiny" / "checkpoints").glob("0*"))[-1] / file
        content = bytearray(damaged.read_bytes())
        content[place] ^= 1
        damaged.write_bytes(bytes(content))
        run = await tiny.train(tmp_path, settings(tiny, model), model)
        assert run.checksum == checksum
        assert [each for each in run.folder.repairs if damaged.parent.name in each], run.folder.repairs


def looked_at(command: Callable[..., None], run: Path, place: Path) -> None:
    """A command that looks at a run shows it, or says in one line what is wrong."""
    app = typer.Typer()
    app.command()(command)
    output = {
        export: ["--output", str(place / "all.parquet")],
        profile: ["--timeline", str(place / "t.json")],
    }
    result = CliRunner().invoke(app, [str(run), *output.get(command, [])])
    assert result.exit_code == 0 or isinstance(result.exception, RollwrightError), result.exception


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + COUNT))
async def test_any_damaged_file_is_told_of_or_repaired(
    tiny: Any, model: Path, whole: tuple[Path, str], tmp_path: Path, seed: int
) -> None:
    path, checksum = whole
    run = tmp_path / "tiny"
    shutil.copytree(path, run)
    draw = random.Random(f"damaged training {seed}")
    before = {each.rollout_id: each.to_bytes() for each in RunReader(run).trajectories()}
    files = sorted(each for each in run.rglob("*") if each.is_file() and "model" not in each.parts)
    file = draw.choice(files)
    content = bytearray(file.read_bytes())
    place = draw.randrange(len(content))
    if draw.random() < 0.5:
        content[place] ^= draw.randrange(1, 256)
    else:
        content[place : place + 64] = draw.randbytes(len(content[place : place + 64]))
    file.write_bytes(bytes(content))
    log = (run / "trajectories.rwlog").read_bytes()
    intact = {each: data for each, data in before.items() if data in log}
    for look in (show, export, profile):
        looked_at(look, run, tmp_path)
    with suppress(RollwrightError):  # what `report` reads, before it plays
        report_of(RunReader(run))
    refused, went_on = None, None
    try:
        went_on = await tiny.train(tmp_path, settings(tiny, model), model)
    except RollwrightError as error:
        refused = str(error)
    if refused is not None:
        assert file.name in refused or str(file.parent) in refused
        return
    if file.name != "config.yaml":  # another setting may be meant
        assert went_on.checksum == checksum
    after = {each.rollout_id: each.to_bytes() for each in RunReader(run).trajectories()}
    assert {each: after[each] for each in intact} == intact


async def test_damaged_records_of_trained_batches_are_read_again_from_the_store_and_give_the_same_weights(
    tiny: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a release that kept both; with members that filters dropped, and some that came too late for their group."""

    async def keep_both(releasing: TrajectoryReleaser, rollout_ids: Sequence[str]) -> None:
        """Releases nothing."""

    manager = {
        "num_env_groups": 4,
        "group_size": 3,
        "group_size_redundancy": 1,
        "tags": ["OddBytes"],
        "filters": [{"kind": "format_error", "action": "drop"}],
    }
    config = settings(tiny, model).model_copy(
        update={"train_env_manager": TrainEnvManagerConfig.model_validate(manager)}
    )
    with monkeypatch.context() as patch:
        patch.setattr(TrajectoryReleaser, "release", keep_both)
        run = await tiny.train(tmp_path, config, model)
    before = {each.rollout_id: each.to_bytes() for each in RunReader(run.folder.path).trajectories()}
    shutil.rmtree(run.folder.path / "checkpoints")
    log = run.folder.path / "trajectories.rwlog"
    content = bytearray(log.read_bytes())
    draw = random.Random(3)
    for _ in range(4):
        place = draw.randrange(len(content) - 900)
        content[place : place + 900] = draw.randbytes(900)
    log.write_bytes(bytes(content))
    assert sum(data not in bytes(content) for data in before.values()) >= 4
    again = await tiny.train(tmp_path, config, model)
    assert again.checksum == run.checksum
    assert any("read again from the store" in line for line in again.folder.repairs), again.folder.repairs
    after = {each.rollout_id: each.to_bytes() for each in RunReader(run.folder.path).trajectories()}
    assert {each: after.get(each) for each in before} == before
