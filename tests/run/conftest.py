"""Real processes for the tests that kill them: started in a folder, waited for by what they have done, never by time."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollwright.run.folder import RunReader
from rollwright.store.invariants import complaints, unfinished
from rollwright.store.opening import open_store
from rollwright.store.records import Attempt, CompletionEntry, Event, RolloutStatus
from rollwright.trajectory import Trajectory

sys.path.insert(0, str(Path(__file__).parent))  # for `damaging` and `box_leftovers`

PATIENCE = 60.0
"""Seconds after which something that was waited for will not come any more, on however slow a machine."""

STEPS, GROUPS, GROUP_SIZE = 3, 4, 4
ROLLOUTS = STEPS * GROUPS * GROUP_SIZE


@dataclass(frozen=True)
class StoreStory:
    """All that a store tells of what happened in it."""

    events: list[Event]
    completions: list[CompletionEntry]
    attempts: list[Attempt]
    recorded_turns: int
    """In committed trajectories, and in the journals of rollouts that have not ended."""

    @property
    def lost_attempts(self) -> int:
        """Attempts that were claimed and brought no result."""
        return sum(each.status != "succeeded" for each in self.attempts)


class CrashLab:
    """`rollwright` commands in one folder; whatever is left of them is killed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_folder = folder / "runs" / "crash"
        self._started: list[subprocess.Popen[str]] = []
        self._workers: set[int] = set()

    def config(self, **more: Any) -> None:
        """Writes `crash.yaml`: synchronous and without redundancy, so every rollout that is opened is handed out."""
        config = {
            "name": "crash",
            "max_steps": STEPS,
            "max_inflight": 16,
            "limits": {"lease_seconds": 2.0, "heartbeat_interval": 0.4, "max_attempts": 20},
            "train_env_manager": {
                "num_env_groups": GROUPS,
                "group_size": GROUP_SIZE,
                "tags": ["FrozenLake", "SimpleSokoban"],
            },
            **more,
        }
        (self.folder / "crash.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def start(self, *words: str | Path, **environment: str) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, "-m", "rollwright", *map(str, words)],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        self._started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
        """Waits for its end; gives what it wrote to standard output and standard error."""
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == code, errors
        assert "Traceback" not in errors
        return output, errors

    def do(self, *words: str | Path, **environment: str) -> str:
        return self.finish(self.start(*words, **environment))[0]

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """The condition's value, as soon as it has one."""
        give_up = time.monotonic() + PATIENCE
        while time.monotonic() < give_up:
            if found := condition():
                return found
            time.sleep(0.02)
        pytest.fail(f"waited in vain for: {what}")

    def workers_of(self, run: subprocess.Popen[str]) -> list[int]:
        """The process ids of a run's workers."""
        found = Path(f"/proc/{run.pid}/task").glob("*/children")
        children = [int(pid) for file in found for pid in file.read_text().split()]
        mine = [pid for pid in children if b"worker" in _command(pid)]
        self._workers.update(mine)
        return mine

    @property
    def living_workers(self) -> list[int]:
        """Those of the workers seen so far that still run."""
        return [pid for pid in self._workers if b"rollwright" in _command(pid)]

    def kill_workers(self) -> None:
        for pid in self.living_workers:
            os.kill(pid, signal.SIGKILL)

    def kill_a_playing_worker(self, run: subprocess.Popen[str]) -> list[int]:
        """Stops a worker, and kills it if it holds a rollout; returns the worker and all processes below it."""
        pid = self.workers_of(run)[0]
        os.kill(pid, signal.SIGSTOP)
        name = _command(pid).decode()
        running = [each for each in self.story().attempts if each.status == "running"]
        held = any(str(each.worker_id) in name for each in running)
        below = _descendants(pid) if held else []
        os.kill(pid, signal.SIGKILL if held else signal.SIGCONT)
        return [pid, *below] if held else []

    def clean_up(self) -> None:
        left = [process for process in self._started if process.poll() is None]
        for process in left:
            self.workers_of(process)
            process.kill()
        self.kill_workers()
        for process in left:
            process.wait()

    def requests(self, stats_url: str) -> int:
        """What the engine was asked for so far."""
        with urllib.request.urlopen(stats_url, timeout=PATIENCE) as answer:
            return int(json.load(answer)["requests"])

    def settled_requests(self, stats_url: str, quiet_seconds: float) -> int:
        """The same, once nobody has asked for anything for a while."""
        asked = -1
        while (now := self.requests(stats_url)) != asked:
            asked = now
            time.sleep(quiet_seconds)
        return asked

    def story(self, path: Path | None = None) -> StoreStory:
        return asyncio.run(_read_story(path or self.run_folder / "store.db"))

    def check_whole(self) -> tuple[list[Trajectory], StoreStory]:
        """Everything was handed out once, and the store kept its promises; gives what there is to look at further."""
        reader = RunReader(self.run_folder)
        rows = reader.metrics()
        assert [(row["mode"], row["step"]) for row in rows] == [("train", step) for step in range(STEPS)]
        groups = [group for row in rows for group in row["groups"]]
        assert len(groups) == len(set(groups)) == STEPS * GROUPS
        trajectories = list(reader.trajectories())
        assert not reader.cut_off
        assert len(trajectories) == len({each.rollout_id for each in trajectories}) == ROLLOUTS
        assert {each.group_id for each in trajectories} == set(groups)
        story = self.story()
        assert complaints(story.events, story.completions) == []
        assert unfinished(story.events) == set()
        assert {each.status for each in story.completions} == {RolloutStatus.SUCCEEDED}
        committed = {each.rollout_id: each.attempt_id for each in story.completions}
        assert committed == {each.rollout_id: each.attempt_id for each in trajectories}
        return trajectories, story


async def _read_story(path: Path) -> StoreStory:
    store = await open_store(str(path))
    try:
        rollouts = await store.query_rollouts()
        attempts = [each for r in rollouts for each in await store.query_attempts(r.rollout_id)]
        journals = [await store.read_journal(each.rollout_id) for each in rollouts]
        kept = await store.get_trajectories([each.rollout_id for each in rollouts])
        committed = [Trajectory.from_bytes(each) for each in kept.values()]
        if (path.parent / "config.yaml").is_file():  # which has what the store has released
            done = {each.rollout_id for each in rollouts if each.status is RolloutStatus.SUCCEEDED}
            logged = RunReader(path.parent).trajectories()
            committed += [each for each in logged if each.rollout_id in done - kept.keys()]
        return StoreStory(
            events=await store.read_events(limit=100_000),
            completions=await store.read_completions(limit=100_000),
            attempts=attempts,
            recorded_turns=sum(map(len, journals)) + sum(len(each.turns) for each in committed),
        )
    finally:
        await store.close()


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            found += [child, *_descendants(child)]
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def crash_lab(tmp_path: Path) -> Iterator[CrashLab]:
    lab = CrashLab(tmp_path)
    yield lab
    lab.clean_up()
