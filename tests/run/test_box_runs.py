"""Runs whose attempts have boxes: tools, agents and rewards share the attempt's box, and none is left whatever is killed."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from box_leftovers import leftovers

from rollwright.agents.tool_agent import ToolAgent
from rollwright.config import build, load
from rollwright.engines.base import Generation, Prompt, Sampling
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.errors import ConfigError
from rollwright.run.fleet import SHORT_LIFE
from rollwright.run.run import Run
from rollwright.sandbox.backends import check_backend, make_backend
from rollwright.sandbox.leases import STATE_VARIABLE, list_records
from rollwright.store.invariants import complaints
from rollwright.store.opening import open_store
from rollwright.tools import Toolbox
from rollwright.tools.bash import bash_tool
from rollwright.trajectory import Trajectory, VersionRun, floats

LEASE = 3.0
KILLED_ROLLOUTS = 24
"""Rollouts of the small test with kills; `make test-boxes` plays 200."""

MODULE = '''
import asyncio

from rollwright.trajectory import Message


async def writes(task, session):
    """Leaves its answer in the box, and a program that runs on."""
    turn = await session.generate([Message("user", task["question"])])
    box = await session.box()
    await box.run("sleep 7777 & :")
    for number in range(3):
        await box.run(f"echo {task['answer']} > /answer; sleep 0.3")
    return turn.text


async def in_box(task, box):
    """Judges by what is in the box."""
    result = await box.run("cat /answer")
    return float(result.stdout.strip() == str(task["answer"]))
'''


EXAMPLE = Path(__file__).parents[2] / "examples" / "boxes" / "config.yaml"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "boxes-state"
    monkeypatch.setenv(STATE_VARIABLE, str(folder))
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))

    async def check() -> str:
        backend = make_backend("bubblewrap")
        try:
            return await check_backend(backend)
        finally:
            await backend.aclose()

    if why := asyncio.run(check()):
        pytest.skip(f"bubblewrap does not run here: {why}")
    yield folder
    assert leftovers(folder) == []


def settings_of(folder: Path, rows: int = 16, **custom: Any) -> dict[str, Any]:
    module = f"boxed_{abs(hash(str(folder)))}"
    (folder / f"{module}.py").write_text(MODULE, encoding="utf-8")
    lines = [json.dumps({"question": f"{n} + 1 = ?", "answer": n + 1}) for n in range(rows)]
    (folder / "sums.jsonl").write_text("\n".join(lines), encoding="utf-8")
    boxed = {
        "tasks": "sums.jsonl",
        "box": {"memory_mb": 256, "lease_seconds": LEASE},
        "agent": f"{module}:writes",
        "rewards": [f"{module}:in_box"],
        **custom,
    }
    return {
        "name": "boxed",
        "folder": str(folder),
        "custom_envs": {"Boxed": boxed},
        "policy": {"kind": "simulated", "tokens_per_second": 1e5, "mean_tokens": 5},
        "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["Boxed"]},
        "limits": {"max_attempts": 2, "max_refills": 1},
    }


async def play(settings: dict[str, Any], **more: Any) -> list[Trajectory]:
    failures: list[str] = []
    async with Run(build(settings), on_failed=lambda _, reason: failures.append(reason), **more) as run:
        played = (await run.get_batch()).trajectories
    assert failures == []
    return played


@pytest.mark.parametrize("processes", [None, 2])
def test_agent_and_reward_share_the_box_of_the_attempt(tmp_path: Path, processes: int | None) -> None:
    played = asyncio.run(play(settings_of(tmp_path), processes=processes))
    assert [each.components for each in played] == [{"in_box": 1.0}] * 4


def test_warm_boxes_are_given_to_attempts(tmp_path: Path) -> None:
    box = {"memory_mb": 256, "lease_seconds": LEASE, "warm": 2}
    played = asyncio.run(play(settings_of(tmp_path, box=box)))
    assert [each.reward for each in played] == [1.0] * 4


def test_an_agent_without_a_box_says_what_to_set(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, box=None)
    settings["limits"] = {"max_attempts": 1, "max_refills": 1}
    failures: list[str] = []

    async def run() -> None:
        async with Run(build(settings), on_failed=lambda _, reason: failures.append(reason)) as it:
            await it.get_batch()

    with pytest.raises(Exception, match="failed"):
        asyncio.run(run())
    assert "this attempt has no box; set custom_envs.TAG.box" in failures[0]


def test_wrong_settings_of_a_box_are_named(tmp_path: Path) -> None:
    for box, why in (
        ({"network": "some"}, "network"),
        ({"allowed_hosts": ["a"]}, "allowed_hosts: is for the network allowlist"),
        ({"memori_mb": 3}, "memori_mb"),
    ):
        with pytest.raises(ConfigError, match=why):
            build(settings_of(tmp_path, box=box))


class Typist:
    """Gives the answers of a script, by the number of answers before."""

    renderer = BytesRenderer()
    version = 0
    pressure = 0

    def __init__(self, *answers: str) -> None:
        self._answers = answers
        self.shown: list[str] = []

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        self.shown.append(self.renderer.decode(prompt.ids or []))
        text = self._answers[min(self.shown[-1].count("```bash\n") - 2, len(self._answers) - 1)]
        ids = self.renderer.encode(text)
        return Generation(
            text, ids, floats([0.0] * len(ids)), (VersionRun(0, len(ids)),), completion_tokens=len(ids)
        )

    async def close(self) -> None: ...


def test_the_terminal_agent_works_by_commands_until_it_is_done(tmp_path: Path) -> None:
    policy = Typist(
        "I look.\n```bash\nls /; cat /nothing\n```",
        "```bash\nsleep 60\n```",
        "```bash\necho $((40 + 2)) > /answer; echo written\n```",
        "```bash\ndone\n```",
    )
    settings = settings_of(tmp_path, rows=1, agent={"kind": "terminal", "seconds": 0.5})
    (tmp_path / "sums.jsonl").write_text(json.dumps({"question": "Write 42 to /answer.", "answer": 42}))
    settings["train_env_manager"] = {"num_env_groups": 1, "group_size": 1, "tags": ["Boxed"]}
    settings["sequence_length"] = 20_000
    (played,) = asyncio.run(play(settings, policy=policy))
    assert played.components == {"in_box": 1.0}
    seen = [turn.outcome.observation for turn in played.turns if turn.outcome is not None]
    assert "No such file or directory" in seen[0]
    assert "[exit code 1]" in seen[0]
    assert "[stopped after" in seen[1]
    assert seen[2] == "written"
    assert [turn.extends for turn in played.turns] == [None, 0, 1, 2]


async def test_the_bash_tool_needs_the_box_of_an_attempt() -> None:
    from rollwright.tools import ToolContext, ToolFailure
    from rollwright.trajectory import ToolCall

    toolbox = Toolbox([bash_tool()])
    assert ToolAgent(toolbox).toolbox.stateful
    with pytest.raises(ToolFailure, match="has no box"):
        await toolbox.run([ToolCall("1", "bash", '{"command": "ls"}')], ToolContext("r"))


def start_run(folder: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "rollwright", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )


def until(condition: Callable[[], Any], what: str, patience: float = 120.0) -> None:
    give_up = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < give_up, f"waited in vain for: {what}"
        time.sleep(0.05)


def workers_of(run: "subprocess.Popen[str]") -> list[int]:
    """Its workers that have lived a while: a run gives up when several in a row die at their start."""
    try:
        found = [each for each in psutil.Process(run.pid).children() if "worker" in each.cmdline()]
        return [each.pid for each in found if time.time() - each.create_time() > SHORT_LIFE + 0.5]
    except psutil.NoSuchProcess:
        return []


def kill_at_random(folder: Path, state: Path, rollouts: int, seed: int) -> None:
    """Plays a run whose workers are killed every moment, and which is itself killed and resumed."""
    draw = random.Random(seed)
    settings = settings_of(folder, rows=rollouts)
    settings["limits"] = {"max_attempts": 50, "lease_seconds": LEASE, "heartbeat_interval": 0.5}
    settings["train_env_manager"] = {"num_env_groups": 4, "group_size": 2, "tags": ["Boxed"]}
    settings["max_steps"], settings["rollout_batch_size"] = rollouts // 8, 8
    (folder / "boxed.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    run = start_run(folder, "run", "boxed.yaml", "--workers", "2")
    kills = 0
    while run.poll() is None:
        until(lambda run=run: run.poll() is not None or list_records(state), "a box")  # type: ignore[misc]
        time.sleep(draw.uniform(0.2, 1.5))
        if run.poll() is not None:
            break
        may_kill = kills < rollouts // 6
        victims = workers_of(run) if may_kill else []
        if may_kill and kills % 3 == 0:
            run.send_signal(signal.SIGKILL)
            run.wait()
            kills += 1
            run = start_run(folder, "resume", "runs/boxed", "--workers", "2")
        elif victims:
            os.kill(draw.choice(victims), signal.SIGKILL)
            kills += 1
    assert run.returncode == 0, run.stderr.read() if run.stderr else ""
    assert kills >= 2
    deadline = time.monotonic() + LEASE + 5
    while (left := leftovers(state)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    check_store(folder / "runs" / "boxed" / "store.db", rollouts)


def check_store(address: Path, rollouts: int) -> None:
    async def read() -> tuple[list[Any], list[Any]]:
        store = await open_store(str(address), must_exist=True)
        try:
            return await store.read_events(limit=100_000), await store.read_completions(limit=100_000)
        finally:
            await store.close()

    events, completions = asyncio.run(read())
    assert complaints(events, completions) == []
    assert len({each.rollout_id for each in completions if each.status == "succeeded"}) == rollouts


def test_no_box_is_left_when_workers_and_run_are_killed(tmp_path: Path, state: Path) -> None:
    kill_at_random(tmp_path, state, KILLED_ROLLOUTS, seed=1)


@pytest.mark.boxes
def test_no_box_of_200_rollouts_is_left_when_workers_and_run_are_killed(tmp_path: Path, state: Path) -> None:
    kill_at_random(tmp_path, state, 200, seed=2)


async def test_the_example_works_in_its_boxes_and_leaves_none(state: Path) -> None:
    async with Run(load(EXAMPLE)) as run:
        played = (await run.get_batch()).trajectories
    assert {each.reward for each in played} <= {0.0, 1.0}
    assert all(each.returned is not None for each in played)
    assert leftovers(state) == []
