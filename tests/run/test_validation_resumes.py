"""A validation that is under way when its run stops goes on like everything else, and the ledger covers all of them."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollwright.config import RunConfig, build
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.playing import play_run
from rollwright.run.run import Run
from rollwright.run.validations import begun_validations, due_validations, recorded_validations
from rollwright.simulation.server_process import RunningServer, simulated_server
from rollwright.store.invariants import complaints, unfinished
from rollwright.store.opening import open_store

STEPS, LEVELS, GROUP = 3, 16, 2
TRAIN = {"num_env_groups": 1, "group_size": GROUP, "tags": ["FrozenLake"]}
VAL = {"num_env_groups": LEVELS, "tags": ["FrozenLake"]}
SETTINGS = {
    "name": "crash",
    "max_steps": STEPS,
    "eval_steps": 1,
    "max_inflight": 6,
    "limits": {"lease_seconds": 1.5, "heartbeat_interval": 0.3, "max_attempts": 20},
    "train_env_manager": TRAIN,
    "val_env_manager": VAL,
}
"""Training is done long before its validations, which play beside it."""


def settings(**more: Any) -> RunConfig:
    return build({**SETTINGS, "policy": {"kind": "simulated", "tokens_per_second": 4000}, **more})


def validations(path: Path) -> Counter[int]:
    return Counter(row["step"] for row in RunReader(path).metrics() if row["mode"] == "val")


@pytest.fixture
async def engine() -> AsyncIterator[RunningServer]:
    async with simulated_server(latency=0.06, latency_sigma=0.3) as server:
        yield server


@pytest.mark.parametrize(
    ("number", "workers"),
    [(signal.SIGKILL, ()), (signal.SIGINT, ()), (signal.SIGKILL, ("--workers", "1"))],
    ids=["killed", "interrupted", "killed_with_workers"],
)
def test_validations_under_way_go_on_and_no_recorded_turn_is_generated_again(
    crash_lab: Any, engine: RunningServer, number: int, workers: tuple[str, ...]
) -> None:
    policy = {"kind": "openai", "base_url": engine.base_url, "model": "simulated"}
    crash_lab.config(**{**SETTINGS, "policy": policy})
    run = crash_lab.start("run", "crash.yaml", *workers)
    metrics = crash_lab.run_folder / "metrics.jsonl"
    crash_lab.until(
        lambda: metrics.exists() and metrics.read_text().count('"mode": "train"') == STEPS, "all steps"
    )
    crash_lab.workers_of(run)
    run.send_signal(number)
    run.communicate(timeout=60)
    crash_lab.until(lambda: not crash_lab.living_workers, "the end of its workers")
    assert sum(validations(crash_lab.run_folder).values()) < STEPS, "it was over before it could be stopped"
    paid = crash_lab.settled_requests(engine.stats_url, quiet_seconds=0.3)
    recorded = crash_lab.story().recorded_turns

    crash_lab.do("resume", "runs/crash", *workers)

    assert validations(crash_lab.run_folder) == {1: 1, 2: 1, 3: 1}
    reader = RunReader(crash_lab.run_folder)
    trajectories = list(reader.trajectories())
    expected = STEPS * GROUP + STEPS * LEVELS
    assert len(trajectories) == len({each.rollout_id for each in trajectories}) == expected
    summary = reader.summary()
    assert summary is not None
    assert summary["ledger"]["opened"] == summary["ledger"]["delivered"] == expected
    turns = sum(len(each.turns) for each in trajectories)
    assert crash_lab.requests(engine.stats_url) - paid == turns - recorded
    story = crash_lab.story()
    assert complaints(story.events, story.completions) == []
    assert unfinished(story.events) == set()
    assert "this run has ended" in crash_lab.do("resume", "runs/crash")


async def interrupted_after(
    config: RunConfig, folder: RunFolder, rows: int, *, resume: bool
) -> dict[str, Any]:
    """Plays until there are so many more lines in the record, and is interrupted then; gives the summary."""
    metrics = folder.path / "metrics.jsonl"
    there = metrics.read_text().count("\n") if metrics.exists() else 0
    playing = asyncio.create_task(play_run(config, folder, resume=resume))
    while not playing.done() and not (metrics.exists() and metrics.read_text().count("\n") >= there + rows):
        await asyncio.sleep(0.01)
    playing.cancel()
    try:
        return await playing
    except asyncio.CancelledError:  # it was over, and was interrupted while it wrote its summary
        folder.log.close()  # as the end of the process would
        return {"interrupted": True}


@pytest.mark.parametrize("ratio", [0, 1], ids=["synchronous", "asynchronous"])
async def test_the_ledger_covers_training_and_all_validations_after_any_number_of_resumes(
    tmp_path: Path, ratio: int
) -> None:
    folder, config = RunFolder.create(tmp_path, settings(async_generation_ratio=ratio))
    summary: dict[str, Any] = {"interrupted": True}
    for attempt in range(20):
        summary = await interrupted_after(config, folder, 1, resume=attempt > 0)
        if not summary["interrupted"]:
            break
        folder = RunFolder.reopen(folder.path)
    assert not summary["interrupted"]
    assert validations(folder.path) == {1: 1, 2: 1, 3: 1}
    store = await open_store(str(folder.path / "store.db"))
    there = (await store.query_rollouts(limit=0)).total
    await store.close()
    ledger = summary["ledger"]
    assert ledger["opened"] == there
    assert ledger["delivered"] == STEPS * GROUP + STEPS * LEVELS
    assert ledger["opened"] == sum(count for place, count in ledger.items() if place != "opened")


async def interrupt_the_validation(config: RunConfig, folder: RunFolder) -> None:
    """Plays until the first rollouts of a validation are in the store, and is interrupted then."""
    address = folder.store_address(None)
    playing = asyncio.create_task(play_run(config, folder))
    while not (folder.path / "store.db").exists():
        await asyncio.sleep(0.01)
    store = await open_store(address)
    while not (await store.query_rollouts(mode="val", limit=0)).total:
        assert not playing.done()
        await asyncio.sleep(0.01)
    await store.close()
    playing.cancel()
    assert (await playing)["interrupted"]
    assert validations(folder.path) == {}


SLOW = {"kind": "simulated", "tokens_per_second": 200}


async def test_a_validation_under_way_is_played_to_its_end_also_when_it_is_not_due_any_more(
    tmp_path: Path,
) -> None:
    """The last one of a run that is then made longer."""
    folder, config = RunFolder.create(tmp_path, settings(eval_steps=None, max_steps=1, policy=SLOW))
    await interrupt_the_validation(config, folder)
    folder = RunFolder.reopen(folder.path)
    longer = settings(eval_steps=None, max_steps=2)
    await play_run(longer, folder, resume=True)
    assert validations(folder.path) == {1: 1, 2: 1}


async def test_a_run_that_only_validates_goes_on_with_its_validation(tmp_path: Path) -> None:
    folder, config = RunFolder.create(tmp_path, settings(train_env_manager=None, policy=SLOW))
    await interrupt_the_validation(config, folder)
    folder = RunFolder.reopen(folder.path)
    faster = settings(train_env_manager=None)
    summary = await play_run(faster, folder, resume=True)
    assert validations(folder.path) == {0: 1}
    assert summary["ledger"]["opened"] == summary["ledger"]["delivered"] == LEVELS


async def test_validations_that_are_counted_go_on_behind_those_of_the_record(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    config = settings()
    async with Run(config, store=store) as run:
        await run.evaluate()
        await run.evaluate()
        first = run.ledger
    rows = [
        {"mode": "val", "step": step, "trajectories": LEVELS, "ledger": {"delivered": LEVELS}}
        for step in (0, 1)
    ]
    async with Run(config, store=store, delivered=[], validated=recorded_validations(rows)) as run:
        assert run.unfinished_validations == []
        batch = await run.evaluate()
        assert {each.group_id.partition("-g")[0] for each in batch.groups} == {"crash.val2"}
        assert run.ledger.opened == first.opened + LEVELS


def test_validations_are_told_from_the_rollouts_that_belong_to_them() -> None:
    ids = [
        "a.b.val0-g0-m0",
        "a.b.val12-g3-m1",
        "a.b.train-g0-m0",
        "xa.b.val4-g0-m0",
        "a.b.val5-g0",
        "aXb.val6-g0-m0",
    ]
    assert begun_validations("a.b", ids) == {0, 12}


def test_validations_are_due_between_the_batches_that_were_handed_out() -> None:
    assert due_validations(7, 2, {4}) == [2, 6]
    assert due_validations(1, 2, set()) == []
    assert due_validations(7, None, set()) == []


def test_a_line_of_an_older_record_says_at_least_what_was_handed_out() -> None:
    (ledger,) = recorded_validations([{"mode": "val", "step": 4, "trajectories": 9}]).values()
    assert ledger.opened == 9
