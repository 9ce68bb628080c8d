"""`enqueue`, `worker`, `ps` and `cancel`, as they are typed: a function of one's own plays tasks of one's own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollwright.cli.main import app

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
