"""`live.json`: there while a run plays, gone when it has ended, cheap, and never in the way."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.config import build
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.live_snapshot import LIVE, MOST_SHARE, PAUSE, LiveSnapshots, pause_after, read_live
from rollwright.run.playing import Progress, RunObserver, play_run
from rollwright.run.run import Run
from rollwright.trajectory import Phase

SETTINGS: dict[str, Any] = {
    "name": "live",
    "max_steps": 2,
    "rollout_batch_size": 8,
    "policy": {"kind": "simulated", "slots": 2, "tokens_per_second": 400, "skill": 0.6},
    "train_env_manager": {"num_env_groups": 2, "group_size": 4, "tags": ["FrozenLake"]},
}


class Watching(RunObserver):
    """Reads the snapshots of a run until one has episodes in flight."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.seen: dict[str, Any] | None = None

    def watch_run(self, run: Run, progress: Progress) -> Any:
        return self

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._look())

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _look(self) -> None:
        while self.seen is None or not self.seen["episodes"]:
            await asyncio.sleep(0.01)
            self.seen = read_live(self._folder)


async def test_a_snapshot_says_what_every_episode_waits_for_and_is_gone_at_the_end(tmp_path: Path) -> None:
    folder, config = RunFolder.create(tmp_path, build(SETTINGS))
    watching = Watching(folder.path)
    await play_run(config, folder, observer=watching)
    seen = watching.seen
    assert seen is not None
    assert (seen["slots"], seen["most_steps"]) == (2, 2)
    assert seen["inflight"] == sum(seen["waiting"].values())
    for each in seen["episodes"]:
        assert each["rollout_id"].startswith("live.train-g")
        assert each["phase"] in set(Phase)
        assert 0 <= each["seconds"] <= each["age"]
        assert each["worker"] == "coroutine-0"
    assert not (folder.path / LIVE).exists()
    assert RunReader(folder.path).ended


async def test_a_snapshot_that_cannot_be_written_disturbs_nothing(tmp_path: Path) -> None:
    folder, _ = RunFolder.create(tmp_path, build(SETTINGS))
    (folder.path / f".{LIVE}.partial").mkdir()
    asked = asyncio.Event()

    def describe() -> dict[str, Any]:
        asked.set()
        return {}

    async with LiveSnapshots(folder, describe):
        await asked.wait()
    assert read_live(folder.path) is None


@given(st.floats(0, 60))
def test_snapshots_take_at_most_their_share_of_the_time(seconds: float) -> None:
    pause = pause_after(seconds)
    assert pause >= PAUSE
    assert seconds <= MOST_SHARE * pause * (1 + 1e-9)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"time": "now"}', b"\xff\xfe"])
def test_a_damaged_snapshot_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LIVE).write_bytes(content)
    assert read_live(tmp_path) is None
