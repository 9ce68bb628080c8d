"""A worker of its own: frozen past its lease, told to stop, or joining over HTTP, it never harms a rollout."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rollwright.store.invariants import complaints
from rollwright.store.records import EventKind

AGENTS = '''
"""Agents that leave a mark when they begin, and go on when there is a file `go`."""

import asyncio
import time
from pathlib import Path


def begin(task):
    Path(f"began-{task['name']}").touch()


async def plain(task, session):
    return task["worth"]


async def busy(task, session):
    """Never lets anything else run in its process: no heartbeat, and nobody who could tell it to stop."""
    begin(task)
    while not Path("go").exists():
        time.sleep(0.02)
    return -1.0


async def patient(task, session):
    begin(task)
    while not Path("go").exists():
        await asyncio.sleep(0.02)
    return task["worth"]
'''

CONFIG = """
policy: {kind: random}
limits: {lease_seconds: 2, heartbeat_interval: 0.4}
val_env_manager: {num_env_groups: 1, tags: [FrozenLake]}
"""


@pytest.fixture
def queue(crash_lab: Any) -> Path:
    """A store with four tasks for a function of one's own, and agents to play them."""
    folder: Path = crash_lab.folder
    (folder / "agents.py").write_text(AGENTS, encoding="utf-8")
    (folder / "tasks.yaml").write_text(CONFIG, encoding="utf-8")
    tasks = [{"name": f"t{number}", "worth": float(number)} for number in range(4)]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)), encoding="utf-8")
    crash_lab.do("enqueue", "tasks.jsonl", "--store", "store.db", "--config", "tasks.yaml")
    return folder / "store.db"


def worker(lab: Any, agent: str, name: str, *words: str, store: str = "store.db", **environment: str) -> Any:
    return lab.start(
        "worker", "--store", store, "--id", name, "--agent", f"agents:{agent}", "--heartbeat-interval", "0.4",
        *words, **environment,
    )  # fmt: skip


def succeeded(lab: Any, store: Path) -> int:
    return sum(each.status == "succeeded" for each in lab.story(store).completions)


def test_a_worker_frozen_past_its_lease_cannot_commit_what_another_has_done_since(
    crash_lab: Any, queue: Path
) -> None:
    frozen = worker(crash_lab, "busy", "frozen", "--envs", "1")
    crash_lab.until((crash_lab.folder / "began-t0").exists, "the first worker's episode")
    frozen.send_signal(signal.SIGSTOP)
    other = worker(crash_lab, "plain", "other", "--max-rollouts", "4")
    crash_lab.finish(other)
    assert succeeded(crash_lab, queue) == 4
    (crash_lab.folder / "go").touch()
    frozen.send_signal(signal.SIGCONT)
    crash_lab.until(lambda: refusals(crash_lab.story(queue)), "the late commit")
    story = crash_lab.story(queue)
    assert refusals(story) == [("frozen", "succeeded")]
    assert complaints(story.events, story.completions) == []
    committed = {each.attempt_id for each in story.completions}
    by = {each.attempt_id: each.worker_id for each in story.attempts}
    assert {by[attempt] for attempt in committed} == {"other"}
    frozen.send_signal(signal.SIGTERM)
    crash_lab.finish(frozen)


def refusals(story: Any) -> list[tuple[str, str]]:
    """Who was refused with what."""
    return [(each.worker_id, each.status) for each in story.events if each.kind is EventKind.REFUSED]


def test_a_frozen_worker_of_a_run_is_replaced_and_stopped_when_it_wakes(crash_lab: Any) -> None:
    crash_lab.config(policy={"slots": 8, "tokens_per_second": 300})
    run = crash_lab.start("run", "crash.yaml", "--workers", "2")
    crash_lab.until(lambda: len(crash_lab.workers_of(run)) == 2, "two workers")
    store = crash_lab.run_folder / "store.db"
    held_by = crash_lab.until(lambda: holder(crash_lab, store), "a worker with rollouts")
    pid = next(pid for pid in crash_lab.workers_of(run) if held_by in name_of(pid))
    os.kill(pid, signal.SIGSTOP)
    crash_lab.until(lambda: lost_by(crash_lab.story(store), held_by), "the end of its leases")
    os.kill(pid, signal.SIGCONT)
    crash_lab.finish(run)
    _, story = crash_lab.check_whole()
    lost = lost_by(story, held_by)
    again = [each for each in story.attempts if each.rollout_id in lost and each.status == "succeeded"]
    assert {each.rollout_id for each in again} == lost


def lost_by(story: Any, worker_id: str) -> set[str]:
    """Rollouts that were taken from this worker because it was silent."""
    return {
        each.rollout_id
        for each in story.attempts
        if each.worker_id == worker_id and each.status == "unresponsive"
    }


def holder(lab: Any, store: Path) -> str | None:
    """A worker that is in the middle of an episode."""
    if not store.exists():
        return None
    playing = [each for each in lab.story(store).attempts if each.status == "running"]
    return playing[0].worker_id if playing else None


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_a_worker_that_is_told_to_stop_hands_back_what_it_cannot_finish(crash_lab: Any, queue: Path) -> None:
    stopped = worker(crash_lab, "patient", "stopped", "--drain-seconds", "0.2")
    for number in range(4):
        crash_lab.until((crash_lab.folder / f"began-t{number}").exists, f"episode {number}")
    stopped.send_signal(signal.SIGTERM)
    output, _ = crash_lab.finish(stopped)
    assert "stopped played 0 rollouts" in output
    crash_lab.finish(worker(crash_lab, "plain", "other", "--max-rollouts", "4"))
    story = crash_lab.story(queue)
    assert succeeded(crash_lab, queue) == 4
    assert sorted((each.worker_id, str(each.status)) for each in story.attempts) == [
        *[("other", "succeeded")] * 4,
        *[("stopped", "cancelled")] * 4,
    ]
    assert complaints(story.events, story.completions) == []


def test_a_worker_that_is_told_to_stop_finishes_what_it_can(crash_lab: Any, queue: Path) -> None:
    stopped = worker(crash_lab, "patient", "stopped")
    for number in range(4):
        crash_lab.until((crash_lab.folder / f"began-t{number}").exists, f"episode {number}")
    stopped.send_signal(signal.SIGTERM)
    (crash_lab.folder / "go").touch()
    output, _ = crash_lab.finish(stopped)
    assert "stopped played 4 rollouts" in output
    assert succeeded(crash_lab, queue) == 4


@pytest.fixture
def served(crash_lab: Any, queue: Path) -> str:
    """The address of a server with the token `secret` over the same store."""
    server = crash_lab.start("serve", "--store", "store.db", "--port", "0", ROLLWRIGHT_STORE_TOKEN="secret")
    assert server.stdout is not None
    words: str = server.stdout.readline()
    assert words.startswith("serving store.db at http://127.0.0.1:")
    return words.split()[-1]


def test_a_worker_joins_a_served_store_with_its_token(crash_lab: Any, queue: Path, served: str) -> None:
    joined = worker(
        crash_lab, "plain", "far", "--max-rollouts", "4", store=served, ROLLWRIGHT_STORE_TOKEN="secret"
    )
    output, _ = crash_lab.finish(joined)
    assert output.count("far took ro-") == 4
    assert succeeded(crash_lab, queue) == 4


@pytest.mark.parametrize("token", ["", "wrong"], ids=["no_token", "wrong_token"])
def test_a_worker_without_the_right_token_is_told_so_in_one_line(
    crash_lab: Any, served: str, token: str
) -> None:
    stranger = worker(crash_lab, "plain", "far", store=served, ROLLWRIGHT_STORE_TOKEN=token)
    _, errors = crash_lab.finish(stranger, code=2)
    assert errors.startswith("error: ")
    assert "ROLLWRIGHT_STORE_TOKEN" in errors
    assert errors.count("\n") == 1
