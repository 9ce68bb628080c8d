"""Kill -9 a training run at any moment: it goes on, no group is trained twice or skipped, and the weights are the same."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollwright.rng import uniform
from rollwright.run.folder import RunReader

STEPS, GROUPS = 14, 4


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import tiny_training

    yield tiny_training
    sys.modules.pop("tiny_training")


@pytest.mark.parametrize("ratio", [0, 1], ids=["synchronous", "asynchronous"])
async def test_a_killed_run_goes_on_to_the_same_weights_and_trains_every_group_once(
    tiny: Any, tmp_path: Path, ratio: int
) -> None:
    model = tiny.save_model(tmp_path / "model")
    more = {"max_steps": STEPS, "async_generation_ratio": ratio}
    kills = 0
    for round_, batches in enumerate((2, 4, 1)):
        pause = 0.15 * uniform("kill", ratio, round_)
        kills += tiny.kill_after(tmp_path / "runs", model, more, batches, pause)
    assert kills >= 2, "the run was too fast to be killed"
    left = tiny.recorded(tmp_path / "runs" / tiny.NAME / "metrics.jsonl")
    assert left > 0
    run = await tiny.train(tmp_path / "runs", tiny.configuration(model, **more), model)

    rows = RunReader(run.folder.path).metrics()
    assert [row["step"] for row in rows] == list(range(STEPS))
    groups = [group for row in rows for group in row["groups"]]
    assert len(groups) == len(set(groups)) == STEPS * GROUPS
    lines = (run.folder.path / "training" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(STEPS))
    assert run.trainer.version == STEPS

    if ratio == 0:
        whole = await tiny.train(tmp_path / "whole", tiny.configuration(model, **more), model)
        assert run.checksum == whole.checksum
        indices = sorted(int(group.rpartition("-g")[2]) for group in groups)
        assert indices == list(range(STEPS * GROUPS)), "no group of the stream was skipped"
    again = tiny.configuration(model, f"training.from_run={run.folder.path}", **more)
    replay = await tiny.train(tmp_path / "again", again, model)
    assert replay.checksum == run.checksum, "the record alone gives the same weights"


LEVELS = 6


@pytest.mark.parametrize("ratio", [0, 1], ids=["synchronous", "asynchronous"])
async def test_validations_of_a_killed_run_are_in_the_record_once_and_the_ledger_has_them_all(
    tiny: Any, tmp_path: Path, ratio: int
) -> None:
    model = tiny.save_model(tmp_path / "model")
    more = {
        "max_steps": 4,
        "async_generation_ratio": ratio,
        "eval_steps": 1,
        "val_env_manager": {"num_env_groups": LEVELS, "tags": ["OddBytes"]},
    }
    for round_, lines in enumerate((1, 2, 1)):
        pause = 0.1 * uniform("validation", ratio, round_)
        tiny.kill_after(tmp_path / "runs", model, more, lines, pause)
    run = await tiny.train(tmp_path / "runs", tiny.configuration(model, **more), model)

    rows = RunReader(run.folder.path).metrics()
    assert [row["step"] for row in rows if row["mode"] == "val"] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows if row["mode"] == "train"] == [0, 1, 2, 3]
    assert [each["step"] for each in run.state.validations] == [0, 1, 2, 3, 4]
    ledger = run.local.ledger
    assert ledger.counts["delivered"] == 4 * 16 + 5 * LEVELS
    if ratio == 0:
        assert ledger.opened == ledger.counts["delivered"]


async def test_the_ledger_has_validations_that_are_forgotten(tiny: Any, tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model")
    more = {"eval_steps": 1, "val_env_manager": {"num_env_groups": LEVELS, "tags": ["OddBytes"]}}
    keep = ["training.keep_steps=1", "training.checkpoint_steps=1", "training.keep_checkpoints=1"]
    run = await tiny.train(tmp_path / "runs", tiny.configuration(model, *keep, max_steps=4, **more), model)
    assert run.state.forgotten.steps > 0
    assert run.local.ledger.opened == 4 * 16 + 5 * LEVELS
    settings = run.folder.path / "config.yaml"
    settings.write_text(settings.read_text().replace("max_steps: 4", "max_steps: 6"), encoding="utf-8")
    longer = await tiny.train(tmp_path / "runs", tiny.configuration(model, *keep, **more), model)
    assert longer.pipeline.done == 6
    assert longer.local.ledger.opened == 6 * 16 + 7 * LEVELS
