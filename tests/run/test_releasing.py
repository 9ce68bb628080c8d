"""A trajectory is given up by the store only when the run's log has it on the disk, and then it is."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from damaging import rollwright

from rollwright.config import build
from rollwright.rollout import Batch
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.pruning import RELEASED_AT_ONCE
from rollwright.run.run import Run
from rollwright.simulation.players import OraclePlayer
from rollwright.store.api import Store
from rollwright.store.memory import MemoryStore
from rollwright.store.opening import open_store
from rollwright.store.records import RolloutStatus

BATCH, STEPS = 128, 8


def content(**more: object) -> dict[str, object]:
    return {
        "name": "lake",
        "max_steps": STEPS,
        "rollout_batch_size": BATCH,
        "async_generation_ratio": 1,
        "policy": {"kind": "oracle"},
        "limits": {"lease_seconds": 1.0, "heartbeat_interval": 0.2, "max_attempts": 20},
        "train_env_manager": {"num_env_groups": 32, "group_size": 8, "tags": ["FrozenLake"]},
        **more,
    }


class Watched(MemoryStore):
    """Looks, whenever something is released, whether all of it is on the disk."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self.folder = folder
        self.released: Counter[str] = Counter()
        self.most_kept = 0
        self.on_disk = 0
        """Bytes of the log that were flushed to the disk."""

    async def release_trajectories(self, rollout_ids: Iterable[str]) -> int:
        wanted = list(rollout_ids)
        ends = [sum(self.folder.log._places[each]) for each in wanted]
        assert max(ends) <= self.on_disk, "what is not on the disk must not be released"
        rows = self._state.rollouts.values()
        self.most_kept = max(self.most_kept, sum(row.trajectory is not None for row in rows))
        self.released.update(wanted)
        return await super().release_trajectories(wanted)


async def test_the_store_gives_up_what_the_log_has_on_the_disk_and_never_earlier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build(content())
    folder = RunFolder.begin(tmp_path / "lake", config)
    store = Watched(folder)
    flush = os.fdatasync

    def watched(handle: int) -> None:
        size = os.fstat(handle).st_size
        flush(handle)
        store.on_disk = max(store.on_disk, size)

    monkeypatch.setattr(os, "fdatasync", watched)
    run = Run(config, policy=OraclePlayer(), store=store, folder=folder, on_finished=folder.add_trajectory)
    async with run:
        batches: list[Batch] = [await run.get_batch() for _ in range(STEPS)]
    handed_out = {each.rollout_id for batch in batches for each in batch.trajectories}
    assert handed_out <= store.released.keys() == set(folder.log.rollouts)
    assert set(store.released.values()) == {1}
    rows = store._state.rollouts
    assert all(rows[each].trajectory is None for each in handed_out)
    assert all(rows[each].status is RolloutStatus.SUCCEEDED for each in handed_out)
    assert store.most_kept < 3 * RELEASED_AT_ONCE, "what both have is bounded, whatever the length of the run"


async def kept_in(store: Store) -> set[str]:
    ids = [each.rollout_id for each in await store.query_rollouts()]
    return set(await store.get_trajectories(ids))


def test_killed_while_it_releases_a_run_goes_on_with_every_batch_once(tmp_path: Path) -> None:
    """Also where a power cut takes what the log was not flushed with."""
    file = tmp_path / "lake.yaml"
    file.write_text(yaml.safe_dump(content()))
    run = tmp_path / "lake"
    command = [sys.executable, "-m", "rollwright", "run", str(file), "--runs", str(tmp_path), "--no-live"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = run / "metrics.jsonl"
    give_up = time.monotonic() + 120
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < give_up
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {each.rollout_id: each.to_bytes() for each in RunReader(run).trajectories()}
    with sqlite3.connect(run / "store.db") as store:
        in_store = {
            rollout_id
            for (rollout_id,) in store.execute(
                "SELECT rollout_id FROM rollouts JOIN trajectories USING (place) WHERE status = 'succeeded'"
            )
        }
    released = before.keys() - in_store
    assert released, "some were released before it was killed"
    log = run / "trajectories.rwlog"
    encoded = log.read_bytes()
    last = max(encoded.index(before[each]) + len(before[each]) for each in released)
    log.write_bytes(encoded[:last])  # what was not flushed is gone with the power
    said = rollwright("resume", str(run), "--no-live")
    assert said.code == 0, said
    reader = RunReader(run)
    assert [row["step"] for row in reader.metrics()] == list(range(STEPS))
    groups = Counter(group for row in reader.metrics() for group in row["groups"])
    assert set(groups.values()) == {1}
    after = {each.rollout_id: each.to_bytes() for each in reader.trajectories()}
    assert {each: after[each] for each in before} == before
    assert reader.problems == []
    assert asyncio.run(_kept(run / "store.db")) & after.keys() == set()


async def _kept(path: Path) -> set[str]:
    store = await open_store(str(path))
    try:
        return await kept_in(store)
    finally:
        await store.close()
