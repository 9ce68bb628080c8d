"""A run that forgets its older steps stays small and is otherwise the run that it would have been, also when it is killed
while it forgets."""

import asyncio
import json
import multiprocessing
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollwright.errors import ConfigError, FormatError, RollwrightError
from rollwright.rng import uniform
from rollwright.run.build_training import check
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.retention import FORGOTTEN, own_index
from rollwright.run.training import TrainingRun

PRELOADED = ["torch", "transformers", "rollwright.run.training", "rollwright.engines.torch"]
PATIENCE = 60.0
"""Seconds after which something that was waited for will not come any more, on however slow a machine."""
KEEP = 2
FILTERS = [
    {"kind": "format_error", "action": "drop"},
    {"kind": "accuracy_band", "high": 0.9, "action": "drop"},
]


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    sys.path.insert(0, str(Path(__file__).parent))
    import tiny_training

    yield tiny_training
    sys.path.remove(str(Path(__file__).parent))
    for name in ("tiny_training", "dying"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def model(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny.save_model(tmp_path_factory.mktemp("model") / "tiny"))


def settings(model: Path, steps: int, keep: int | None, **more: Any) -> dict[str, Any]:
    """With filters that replace members and drop groups, and validations: everything that a folder can have."""
    return {
        "max_steps": steps,
        "eval_steps": 2,
        "train_env_manager": {
            "num_env_groups": 3,
            "group_size": 3,
            "tags": ["OddBytes"],
            "filters": FILTERS,
        },
        "val_env_manager": {"num_env_groups": 2, "tags": ["OddBytes"]},
        "training": {
            "model": str(model),
            "learning_rate": 3e-3,
            "checkpoint_steps": 1,
            "keep_checkpoints": 1,
            "hand_over": "tensors",
            "keep_steps": keep,
        },
        **more,
    }


async def train(tiny: Any, model: Path, runs: Path, steps: int, keep: int | None, **more: Any) -> TrainingRun:
    config = tiny.configuration(model, **settings(model, steps, keep, **more))
    run: TrainingRun = await tiny.train(runs, config, model)
    return run


def told(run: TrainingRun) -> dict[str, Any]:
    """All that a run says of itself, apart from what took how long."""
    assert run.local is not None
    summary = run.summary()
    return {
        "ledger": run.local.schedulers[0].ledger,
        **{name: summary[name] for name in ("steps", "weights", "left_out", "staleness", "length_bias")},
    }


def without_examples(found: dict[str, Any]) -> dict[str, Any]:
    """What a filter caught first may be another rollout after a restart: groups that were handed out are told first."""
    ledger = found["ledger"].row()
    ledger["catches"] = {name: count for name, (count, _) in ledger["catches"].items()}
    return {**found, "ledger": ledger}


def figures(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "training" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    timed = ("time/", "seconds", "per_second")
    rows = [json.loads(line) for line in lines]
    return [{key: row[key] for key in row if not any(each in key for each in timed)} for row in rows]


def rollouts(folder: Path) -> list[str]:
    with sqlite3.connect(folder / "store.db") as store:
        return [each for (each,) in store.execute("SELECT rollout_id FROM rollouts")]


def rows_in_store(folder: Path) -> int:
    with sqlite3.connect(folder / "store.db") as store:
        tables = [name for (name,) in store.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return sum(store.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables)


def in_files(folder: Path) -> dict[str, Any]:
    """What is written, not what readers make of it."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / FORGOTTEN).rename(folder / "aside")
    log = [each.rollout_id for each in RunReader(folder).trajectories()]
    (folder / "aside").rename(folder / FORGOTTEN)
    return {
        "steps": [row["step"] for line in lines if (row := json.loads(line))["mode"] == "train"],
        "validations": [row["step"] for line in lines if (row := json.loads(line))["mode"] == "val"],
        "figures": sorted({row["step"] for row in figures(folder)}),
        "log": sorted(log),
        "store": sorted(rollouts(folder)),
    }


@pytest.fixture(scope="module")
def whole(tiny: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Eight steps of which nothing is forgotten."""
    return asyncio.run(train(tiny, model, tmp_path_factory.mktemp("whole"), 8, None))


async def test_a_run_that_forgets_is_otherwise_the_same_run(
    tiny: Any, model: Path, whole: TrainingRun, tmp_path: Path
) -> None:
    run = await train(tiny, model, tmp_path, 8, KEEP)
    assert told(run) == told(whole)
    caught = told(whole)["ledger"].catches.by_filter
    assert set(caught) == {"format_error", "accuracy_band"}, "the filters have something to do"
    assert run.state.forgotten.steps == 6
    files = in_files(run.folder.path)
    assert files["steps"] == [6, 7]
    assert files["validations"] == files["figures"][::2] == [6, 8]
    kept = [row for row in figures(whole.folder.path) if row["step"] >= 6]
    assert figures(run.folder.path) == kept
    lowest = min(
        own_index("tiny", each.rpartition("-m")[0]) or 0 for each in files["log"] if ".train-" in each
    )
    assert lowest == run.state.forgotten.floor > 0
    assert not any(run.state.forgotten.has_rollout(each) for each in files["log"] + files["store"])
    assert [each["step"] for each in run.state.validations] == [6, 8]


async def test_a_folder_without_retention_has_no_word_of_it(whole: TrainingRun) -> None:
    assert not (whole.folder.path / FORGOTTEN).exists()
    assert RunReader(whole.folder.path).shown_steps() is None
    assert [row["step"] for row in RunReader(whole.folder.path).metrics() if row["mode"] == "train"] == list(
        range(8)
    )


def sizes(run: TrainingRun) -> dict[str, int]:
    folder, local = run.folder.path, run.local
    assert local is not None
    book = local.schedulers[0]._book
    assert book._accounts is not None
    names = ("trajectories.rwlog", "metrics.jsonl", "training/metrics.jsonl", FORGOTTEN)
    return {
        **{name: (folder / name).stat().st_size for name in names},
        "pages": sum(each.stat().st_size for each in folder.glob("store.db*")),
        "rows": rows_in_store(folder),
        "written": len(run.folder.log) + len(run.folder.failed),
        "lengths": len(run.state.lengths),
        "record": len(run.state.record.rows),
        "validations": len(run.state.validations),
        "accounts": len(book._accounts),
        "schedulers": len(local.schedulers),
        "checkpoints": len(list((folder / "checkpoints").iterdir())),
    }


@pytest.mark.parametrize("ratio", [0, 1], ids=["synchronous", "asynchronous"])
async def test_neither_files_nor_memory_grow_with_the_steps(
    tiny: Any, model: Path, tmp_path: Path, ratio: int
) -> None:
    keep = 3
    runs = [
        await train(tiny, model, tmp_path / str(steps), steps, keep, async_generation_ratio=ratio)
        for steps in (3 * keep, 9 * keep)
    ]
    short, long = map(sizes, runs)
    for name, size in long.items():
        # keeping all makes it three times as large; how far rollouts are ahead differs from one moment to the next
        assert size <= 2 * short[name] + 100, f"{name} grows: {short[name]} after 9 steps, {size} after 27"
    assert keep <= long["record"] <= 2 * keep
    groups = [group for row in RunReader(runs[1].folder.path).metrics() for group in row["groups"]]
    assert len(groups) == len(set(groups))


async def test_it_is_put_off_until_as_much_can_go_as_stays(tiny: Any, model: Path, tmp_path: Path) -> None:
    run = await train(tiny, model, tmp_path, 7, 4)
    assert run.state.forgotten.steps == 0
    assert not (run.folder.path / FORGOTTEN).exists()


async def test_nothing_behind_the_oldest_checkpoint_is_forgotten(
    tiny: Any, model: Path, tmp_path: Path
) -> None:
    training = {**settings(model, 9, 1)["training"], "checkpoint_steps": 2, "keep_checkpoints": 3}
    run = await train(tiny, model, tmp_path, 9, 1, training=training)
    kept = sorted(int(each.name) for each in (run.folder.path / "checkpoints").iterdir())
    assert kept == [6, 8, 9]
    assert run.state.forgotten.steps == 6
    shutil.rmtree(run.folder.path / "checkpoints" / "000009")
    shutil.rmtree(run.folder.path / "checkpoints" / "000008")
    again = await train(tiny, model, tmp_path, 9, 1, training=training)
    assert again.checksum == run.checksum, "the oldest checkpoint and the record alone give the same weights"


def kill_at(tiny: Any, runs: Path, model: Path, operation: int, more: dict[str, Any]) -> int | None:
    import dying

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=dying.train_in_process, args=(runs, model, more, operation))
    process.start()
    process.join()
    return process.exitcode


async def test_killed_at_any_operation_of_forgetting_it_goes_on_as_if_it_had_not(
    tiny: Any, model: Path, whole: TrainingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each operation of the second time, when something is forgotten already."""
    import dying

    operations = dying.Operations()
    with monkeypatch.context() as patch:
        operations.watch(patch.setattr)
        undisturbed = await train(tiny, model, tmp_path / "undisturbed", 8, KEEP)
    assert undisturbed.state.forgotten.steps == 6
    each_time, rest = divmod(len(operations.names), 3)
    assert rest == 0
    assert each_time >= 10
    assert set(operations.names[:each_time]) == {"fsync", "replace", "delete_rollouts"}
    same = 0
    for operation in range(each_time + 1, 2 * each_time + 1):
        runs, more = tmp_path / f"{operation}", settings(model, 8, KEEP)
        assert kill_at(tiny, runs, model, operation, more) == -signal.SIGKILL
        left = RunReader(runs / "tiny")
        seen = left.metrics(), [each.rollout_id for each in left.trajectories()], left.failures()
        RunFolder.reopen(left.path).log.close()
        assert seen == (left.metrics(), [each.rollout_id for each in left.trajectories()], left.failures())
        run = await train(tiny, model, runs, 8, KEEP)
        assert told(run) == told(whole), f"killed before operation {operation}"
        files, forgotten = in_files(run.folder.path), run.state.forgotten
        assert files["steps"] == list(range(forgotten.steps, 8))
        assert KEEP <= len(files["steps"]) <= 2 * KEEP
        assert min(files["figures"]) == forgotten.steps
        assert not any(forgotten.has_rollout(each) for each in files["log"] + files["store"])
        if forgotten.steps == undisturbed.state.forgotten.steps:  # killed after it was settled what to forget
            assert forgotten == undisturbed.state.forgotten
            assert files == in_files(undisturbed.folder.path)
            same += 1
    assert same >= each_time - 3


def lines(file: Path) -> list[dict[str, Any]]:
    whole = file.read_text(encoding="utf-8").rpartition("\n")[0] if file.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def test_an_asynchronous_run_killed_at_any_moment_hands_out_every_group_once(
    tiny: Any, model: Path, tmp_path: Path
) -> None:
    """Groups are handed out in another order than they were opened in, and some are dropped."""
    import dying

    steps, told = 30, tmp_path / "told"
    more = settings(model, steps, KEEP, async_generation_ratio=2)
    more["train_env_manager"]["num_env_groups"] = 9
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    kills = 0
    while kills < 6 and len(lines(told)) < steps:
        goal = len(lines(told)) + 3
        process = context.Process(target=dying.train_and_tell, args=(tmp_path, model, more, told))
        process.start()
        ends = time.monotonic() + PATIENCE
        while len(lines(told)) < goal and process.is_alive():
            assert time.monotonic() < ends, "waited in vain for batches"
            time.sleep(0.005)
        time.sleep(0.05 * uniform("kill", kills))
        kills += process.is_alive()
        process.kill()
        process.join()
    assert kills >= 4, "the run was too fast to be killed"
    process = context.Process(target=dying.train_and_tell, args=(tmp_path, model, more, told))
    process.start()
    process.join()
    assert process.exitcode == 0
    reader = RunReader(tmp_path / "tiny")
    assert reader.forgotten().steps > steps - 2 * KEEP - 1
    batches = [row for row in lines(told) if row["mode"] == "train"]
    # a line that was written and not told, because the process was killed in between, is missing here
    assert steps - kills <= len(batches) <= steps
    groups = [group for row in batches for group in row["groups"]]
    assert len(groups) == len(set(groups)), "no group was handed out twice"
    folder = reader.path
    assert not any(reader.forgotten().has_rollout(each) for each in in_files(folder)["store"])


async def test_stopped_and_gone_on_with_again_and_again_it_is_the_same_run(
    tiny: Any, model: Path, whole: TrainingRun, tmp_path: Path
) -> None:
    for steps in (3, 5, 6, 8):
        settings_file = tmp_path / "tiny" / "config.yaml"
        if settings_file.exists():
            text = settings_file.read_text(encoding="utf-8")
            settings_file.write_text(
                "\n".join(
                    f"max_steps: {steps}" if line.startswith("max_steps:") else line
                    for line in text.split("\n")
                )
            )
        run = await train(tiny, model, tmp_path, steps, KEEP)
    assert without_examples(told(run)) == without_examples(told(whole))
    assert run.state.forgotten.steps > 0


async def test_a_run_that_has_forgotten_steps_is_refused_as_a_source(
    tiny: Any, model: Path, tmp_path: Path
) -> None:
    run = await train(tiny, model, tmp_path / "source", 4, KEEP)
    config = tiny.configuration(model, f"training.from_run={run.folder.path}")
    with pytest.raises(ConfigError) as error:
        check(config)
    assert str(error.value) == (
        f"training.from_run: {run.folder.path} has forgotten its first 2 steps (training.keep_steps), so its batches "
        "cannot be trained on from the base model"
    )


async def test_training_on_a_recorded_run_forgets_too(
    tiny: Any, model: Path, whole: TrainingRun, tmp_path: Path
) -> None:
    more = settings(model, 8, KEEP)
    more["training"]["from_run"] = str(whole.folder.path)
    config = tiny.configuration(model, **more)
    run = await tiny.train(tmp_path, config, model)
    assert run.checksum == whole.checksum
    assert [row["step"] for row in RunReader(run.folder.path).metrics()] == [6, 7]
    assert len(RunReader(whole.folder.path).metrics()) > 8, "the source is left as it is"


async def test_without_any_checkpoint_a_run_that_has_forgotten_says_what_is_missing(
    tiny: Any, model: Path, tmp_path: Path
) -> None:
    run = await train(tiny, model, tmp_path, 4, KEEP)
    shutil.rmtree(run.folder.path / "checkpoints")
    with pytest.raises(FormatError, match="checkpoints: no checkpoint is intact, and the first 2 steps"):
        await train(tiny, model, tmp_path, 4, KEEP)


async def test_what_is_wrong_in_forgotten_json_is_said_in_one_line(
    tiny: Any, model: Path, tmp_path: Path
) -> None:
    run = await train(tiny, model, tmp_path, 4, KEEP)
    file = run.folder.path / FORGOTTEN
    file.write_text('{"format": 7}', encoding="utf-8")
    with pytest.raises(FormatError, match="has format 7; accepted: 1"):
        RunReader(run.folder.path).metrics()


async def test_whoever_opened_the_log_before_it_was_replaced_does_not_get_the_run(
    tiny: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking, its writer puts another log in place, and lets go of the old one."""
    run = await train(tiny, model, tmp_path, 4, KEEP)
    log = run.folder.path / "trajectories.rwlog"
    from rollwright.run import trajectory_log as module

    lock = module.lock

    def late(opened: Any, path: Path) -> None:
        copy = log.with_suffix(".copy")
        shutil.copy(log, copy)
        copy.replace(log)
        lock(opened, path)

    monkeypatch.setattr(module, "lock", late)
    with pytest.raises(RollwrightError, match="another process is writing"):
        RunFolder.reopen(run.folder.path)


@pytest.mark.parametrize("wrong", ["0", "-3", "1.5", "some", "true"])
def test_a_wrong_number_of_steps_is_refused(tiny: Any, model: Path, wrong: str) -> None:
    with pytest.raises(
        ConfigError, match=r"training.keep_steps: .* is neither a number of steps, at least 1, nor `all`"
    ):
        tiny.configuration(model, f"training.keep_steps={wrong}")
