"""The whole path with a real model: record, trainer, weights back to the policy; the same numbers every time."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollwright.errors import ConfigError, FormatError
from rollwright.run.build_training import check
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.training import TrainingRun
from rollwright.simulation.players import RandomPlayer


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import tiny_training

    yield tiny_training
    sys.modules.pop("tiny_training")


@pytest.fixture
def model(tiny: Any, tmp_path: Path) -> Path:
    return Path(tiny.save_model(tmp_path / "model"))


def figures(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "training" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def curve(folder: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["reward"], row["loss"]) for row in figures(folder) if "reward" in row]


async def test_the_same_seed_gives_the_same_curve_and_the_same_weights_bit_for_bit(
    tiny: Any, model: Path, tmp_path: Path
) -> None:
    config = tiny.configuration(model, max_steps=8)
    first, second = [await tiny.train(tmp_path / name, config, model) for name in ("a", "b")]
    assert curve(first.folder.path) == curve(second.folder.path)
    assert len(curve(first.folder.path)) == 8
    assert first.checksum == second.checksum is not None
    other = await tiny.train(tmp_path / "c", tiny.configuration(model, max_steps=8, seed=7), model)
    assert other.checksum != first.checksum


async def test_a_model_learns_what_is_rewarded(tiny: Any, model: Path, tmp_path: Path) -> None:
    config = tiny.configuration(
        model,
        "training.learning_rate=0.02",
        max_steps=16,
        eval_steps=16,
        train_env_manager={"num_env_groups": 8, "group_size": 4, "tags": ["OddBytes"]},
        val_env_manager={"num_env_groups": 4, "tags": ["OddBytes"]},
    )
    run = await tiny.train(tmp_path / "runs", config, model)
    rewards = [reward for _, reward, _ in curve(run.folder.path)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    assert [each["step"] for each in run.state.validations] == [0, 16]
    validations = [row for row in RunReader(run.folder.path).metrics() if row["mode"] == "val"]
    assert [row["version"] for row in validations] == [0, 16]


async def test_an_asynchronous_run_keeps_the_bound_for_every_token(
    tiny: Any, model: Path, tmp_path: Path
) -> None:
    config = tiny.configuration(model, max_steps=12, async_generation_ratio=1)
    run = await tiny.train(tmp_path / "runs", config, model)
    reader = RunReader(run.folder.path)
    versions = {group: row["version"] for row in reader.metrics() for group in row["groups"]}
    ages = [
        versions[trajectory.group_id] - stamp.version
        for trajectory in reader.trajectories()
        if trajectory.group_id in versions
        for turn in trajectory.turns
        for stamp in turn.versions
    ]
    assert max(ages) == 1, "the bound is kept, and used"
    assert min(ages) >= 0
    assert set(run.state.staleness) == set(ages)
    assert sorted(versions.values()) == sorted(list(range(12)) * 4)
    assert run.state.bias.trained == 12 * 16
    assert run.state.bias.generated >= run.state.bias.trained


async def test_weights_go_over_as_a_folder_with_a_checksum_where_that_is_asked_for(
    tiny: Any, model: Path, tmp_path: Path
) -> None:
    in_memory = await tiny.train(tmp_path / "a", tiny.configuration(model, max_steps=3), model)
    by_folder = await tiny.train(
        tmp_path / "b", tiny.configuration(model, "training.hand_over=folder", max_steps=3), model
    )
    assert by_folder.checksum == in_memory.checksum
    kept = sorted(each.name for each in (by_folder.folder.path / "weights").iterdir())
    assert kept == ["000002", "000003"]
    assert not (in_memory.folder.path / "weights").exists()


async def test_a_finished_run_leaves_a_model_its_figures_and_the_newest_checkpoints(
    tiny: Any, model: Path, tmp_path: Path
) -> None:
    config = tiny.configuration(
        model, "training.checkpoint_steps=2", "training.writers=[jsonl,tensorboard]", max_steps=6
    )
    run = await tiny.train(tmp_path / "runs", config, model)
    folder = run.folder.path
    assert sorted(each.name for each in (folder / "checkpoints").iterdir()) == ["000004", "000006"]
    assert {"config.json", "model.safetensors"} <= {each.name for each in (folder / "model").iterdir()}
    assert list((folder / "training" / "tensorboard").iterdir())
    row = figures(folder)[-1]
    assert {"time/rollout", "time/train", "length/ratio", "gap", "staleness/0"} <= set(row)
    assert run.summary()["weights"] == run.checksum


async def test_a_checkpoint_that_is_not_of_this_record_is_refused(
    tiny: Any, model: Path, tmp_path: Path
) -> None:
    config = tiny.configuration(model, max_steps=4)
    run = await tiny.train(tmp_path / "runs", config, model)
    file = run.folder.path / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        del row["crc"]  # which would undo the change
        row["groups"] = [group.replace("-g0", "-g9") for group in row["groups"]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(FormatError, match="are not those of the record"):
        await tiny.train(tmp_path / "runs", config, model)


def folder_for(config: Any, tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", config)[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training=null", "training: is not set"),
        ("train_env_manager=null", "nothing to train on"),
        ("sampling.top_p=0.9", "only 1 is accepted"),
        ("sampling.temperature=0", "temperature"),
        ("training.advantage=gropo", "unknown `gropo`"),
        ("training.advantage.options.stdd=true", "unknown setting 'stdd'"),
        ("training.model=null", "training.model: is needed"),
        ("training.from_run=nowhere", "is not a run folder"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(
    tiny: Any, model: Path, tmp_path: Path, override: str, message: str
) -> None:
    more = {"val_env_manager": {"num_env_groups": 1, "tags": ["OddBytes"]}}
    config = tiny.configuration(model, override, **more)
    with pytest.raises(Exception, match=message) as caught:
        TrainingRun(config, folder_for(config, tmp_path), policy=RandomPlayer())
    assert "\n" not in str(caught.value)


def test_a_policy_that_takes_no_weights_cannot_be_trained(tiny: Any, model: Path, tmp_path: Path) -> None:
    config = tiny.configuration(model)
    with pytest.raises(ConfigError, match="takes no new weights"):
        TrainingRun(config, folder_for(config, tmp_path), policy=RandomPlayer())


async def test_an_interrupt_leaves_a_run_that_goes_on(tiny: Any, model: Path, tmp_path: Path) -> None:
    config = tiny.configuration(model, max_steps=10)
    whole = await tiny.train(tmp_path / "whole", config, model)
    task = asyncio.create_task(tiny.train(tmp_path / "runs", config, model))
    record = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    while not record.is_file() or record.read_text(encoding="utf-8").count("\n") < 3:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = await tiny.train(tmp_path / "runs", config, model)
    assert again.checksum == whole.checksum
    assert curve(again.folder.path) == curve(whole.folder.path)


def test_a_lone_tree_of_one_token_answers_is_refused_unless_it_is_compared_with_a_running_value(
    tiny: Any, model: Path
) -> None:
    def checked(group_size: int, tokens: int, advantage: str) -> None:
        check(
            tiny.configuration(
                model,
                f"training.advantage={advantage}",
                f"custom_envs.OddBytes.max_tokens_per_step={tokens}",
                strategy={"kind": "tree", "width": 2, "depth": 2},
                train_env_manager={"num_env_groups": 4, "group_size": group_size, "tags": ["OddBytes"]},
            )
        )

    with pytest.raises(
        ConfigError, match=r"group_size: a tree alone in its group .* `OddBytes` .* accepted: 2 or more"
    ):
        checked(1, 1, "tree")
    checked(2, 1, "tree")
    checked(1, 4, "tree")
    checked(1, 1, "{name: tree, options: {kappa: 2}}")
