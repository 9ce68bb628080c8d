"""`enqueue`, `worker`, `ps` and `cancel`, as they are typed: a function of one's own plays tasks of one's own."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollwright.cli.main import app
from rollwright.store.opening import open_store
from rollwright.store.records import WorkerRecord, WorkerStatus
from rollwright.ui.store_view import worker_state

AGENT = """
async def agent(task, session):
    if task["n"] == 2:
        raise ValueError("two is [bold]wrong[/bold]")
    return float(task["n"])
"""
TASKS = "".join(f'{{"n": {number}}}\n' for number in range(1, 4))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_agent_of_queue_test.py").write_text(AGENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "store.db"


def typed(*words: str | Path, given: str = "") -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], input=given)
    assert done.exit_code == 0, done.output
    return done.output


def test_tasks_need_no_settings_where_the_agent_needs_no_model_and_failures_say_why(store: Path) -> None:
    enqueued = typed("enqueue", "-", "--store", store, given=TASKS).split()
    assert len(enqueued) == 3
    words = ("--agent", "own_agent_of_queue_test:agent", "--max-rollouts", "3", "--id", "w")
    said = typed("worker", "--store", store, *words)
    assert re.findall(r"^w took (\S+)$", said, re.MULTILINE) == enqueued
    assert f"w failed at {enqueued[1]}: agent: ValueError: two is [bold]wrong[/bold]\n" in said
    assert "w played 2 rollouts" in said
    seen = typed("ps", "--store", store)
    assert "requeuing 1  succeeded 2" in seen
    assert enqueued[1] in seen
    assert "agent: ValueError: two is" in seen
    assert typed("cancel", enqueued[1], "--store", store) == "cancelled 1 of 1\n"
    assert "succeeded 2  failed 0  cancelled 1" in typed("ps", "--store", store)


def test_a_worker_without_an_agent_says_that_tasks_have_no_settings(store: Path) -> None:
    typed("enqueue", "-", "--store", store, given='{"n": 1}\n')
    said = typed("worker", "--store", store, "--max-rollouts", "1", "--id", "w")
    assert "names no run whose settings" in said
    assert "rollwright enqueue --config" in said


SPEAKER = """
import openai

async def speaker(task, session):
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        said = [{"role": "user", "content": "hello"}]
        await client.chat.completions.create(model="m", messages=said, temperature=0)
    return 0.5
"""


def test_a_stored_trajectory_is_shown_with_how_it_was_sampled_and_what_was_ignored(
    store: Path, tmp_path: Path
) -> None:
    (tmp_path / "own_speaker_of_queue_test.py").write_text(SPEAKER)
    config = tmp_path / "config.yaml"
    config.write_text("sampling: {temperature: 0.7}\npolicy: {tokens_per_second: 100000}\n")
    (name,) = typed("enqueue", "-", "--store", store, "--config", config, given='{"n": 1}\n').split()
    words = ("--agent", "own_speaker_of_queue_test:speaker", "--max-rollouts", "1", "--id", "w")
    typed("worker", "--store", store, *words)
    assert name in typed("show", store)
    shown = typed("show", store, name)
    assert "sampled at temperature 0.7" in shown
    assert "gateway_sampling_ignored 1" in shown
    assert "reward 0.5" in shown
    missing = CliRunner().invoke(app, ["show", str(store), "nobody"])
    assert missing.exit_code != 0
    assert "0 rollouts of" in str(missing.exception)


def test_a_worker_without_a_reachable_store_says_what_it_tries_and_ends() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "rollwright",
            "worker",
            "--store",
            "http://127.0.0.1:1",
            "--store-patience",
            "1",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "Connection refused; trying for 1 more seconds" in done.stdout
    assert done.stderr.count("\n") == 1
    assert "Connection refused (after " in done.stderr


def test_ps_says_why_rollouts_failed_and_that_a_worker_has_ended(store: Path) -> None:
    typed("enqueue", "-", "--store", store, "--max-attempts", "1", given=TASKS)
    words = ("--agent", "own_agent_of_queue_test:agent", "--max-rollouts", "3", "--id", "w", "--quiet")
    typed("worker", "--store", store, *words)
    seen = typed("ps", "--store", store)
    assert "failed rollouts: 1" in seen
    assert re.search(r"1 +agent: ValueError: two is \[bold\]wrong\[/bold\] +ro-", seen)
    assert re.search(r"w +ended +\d+:\d\d ago", seen)


@pytest.mark.parametrize(
    ("status", "stats", "age", "state"),
    [
        (WorkerStatus.IDLE, {"heartbeat_interval": 5.0}, 4.0, "idle"),
        (WorkerStatus.BUSY, {"heartbeat_interval": 5.0}, 4.0, "busy"),
        (WorkerStatus.IDLE, {"heartbeat_interval": 5.0}, 16.0, "lost"),
        (WorkerStatus.BUSY, {"heartbeat_interval": 0.5}, 2.0, "lost"),
        (WorkerStatus.IDLE, {}, 16.0, "lost"),
        (WorkerStatus.IDLE, {"heartbeat_interval": 60.0}, 100.0, "idle"),
        (WorkerStatus.IDLE, {"heartbeat_interval": 5.0, "ended": True}, 1000.0, "ended"),
        (WorkerStatus.BUSY, {"heartbeat_interval": 5.0, "ended": True}, 1.0, "busy"),
        (WorkerStatus.UNKNOWN, {}, 0.0, "lost"),
        (WorkerStatus.IDLE, {}, None, "lost"),
    ],
)
def test_a_worker_that_is_not_heard_of_is_lost_and_not_idle(
    status: WorkerStatus, stats: dict[str, object], age: float | None, state: str
) -> None:
    heard = None if age is None else 1000.0 - age
    assert worker_state(WorkerRecord("w", status, stats, last_heartbeat_time=heard), now=1000.0) == state


def test_a_rollout_that_is_being_played_is_shown_as_running_before_its_first_turn(store: Path) -> None:
    async def claim() -> None:
        opened = await open_store(str(store))
        await opened.enqueue_rollout({"n": 1}, rollout_id="sleeper")
        await opened.dequeue_rollout("w", timeout=5)
        await opened.close()

    asyncio.run(claim())
    seen = typed("ps", "--store", store)
    assert "running 1 (1 without a turn yet)" in seen
    assert re.search(r"sleeper +running, no turn yet +1 \(under way\) +w ", seen)
    assert "preparing" not in seen
