"""A worker that is killed in the middle of an agent's call: at most that generation is paid again, the agent's processes
are gone, and every rollout ends once."""

import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollwright.simulation.server_process import RunningServer, simulated_server

LATENCY = 0.25
"""Seconds of a generation: a worker that plays is nearly always in the middle of one."""

CALLS = 2

AGENT = f"""
import json, os, subprocess, urllib.request
from pathlib import Path

def talk(task, base_url, api_key):
    messages = [{{"role": "user", "content": task["question"]}}]
    for number in range({CALLS}):
        body = json.dumps({{"model": "m", "messages": messages}}).encode()
        head = {{"authorization": f"Bearer {{api_key}}"}}
        request = urllib.request.Request(f"{{base_url}}/chat/completions", body, head)
        with urllib.request.build_opener(urllib.request.ProxyHandler({{}})).open(request) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
        messages += [{{"role": "assistant", "content": said}}, {{"role": "user", "content": f"And {{number}}?"}}]
    return said

def solve(task, session):
    return talk(task, session.base_url, session.api_key)

if __name__ == "__main__":
    # A daemon in a session of its own, which would outlive everything that only kills process groups.
    subprocess.Popen(["sleep", "3600.{{}}".format(os.environ["MARK"])], start_new_session=True)
    task = json.loads(Path("task.json").read_text())
    print(talk(task, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))
"""


@pytest.fixture
async def engine() -> AsyncIterator[RunningServer]:
    async with simulated_server(latency=LATENCY, latency_sigma=0.1) as server:
        yield server


def processes(*marks: str) -> list[int]:
    """Processes whose command line has all of these."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if all(mark in words for mark in marks):
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize(
    "agent",
    [
        pytest.param("killed_agent:solve", id="function"),
        pytest.param({"function": "killed_agent:solve", "process": True}, id="process"),
        pytest.param({"command": [sys.executable, "killed_agent.py"]}, id="command"),
    ],
)
def test_a_worker_killed_in_the_middle_of_a_call_pays_for_that_call_at_most(
    crash_lab: Any, engine: RunningServer, agent: Any
) -> None:
    folder: Path = crash_lab.folder
    (folder / "killed_agent.py").write_text(AGENT, encoding="utf-8")
    rows = [{"question": f"{n} + 1 = ?"} for n in range(16)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tag = {"tasks": "sums.jsonl", "agent": agent, "rewards": [{"kind": "length", "limit": 0, "ramp": 50}]}
    crash_lab.config(
        policy={"kind": "openai", "base_url": engine.base_url, "model": "simulated"},
        custom_envs={"Sums": tag},
        train_env_manager={"num_env_groups": 4, "group_size": 4, "tags": ["Sums"]},
    )
    mark = str(os.getpid())
    run = crash_lab.start("run", "crash.yaml", "--workers", "2", MARK=mark)
    crash_lab.until(lambda: len(crash_lab.workers_of(run)) == 2, "two workers")
    crash_lab.until(lambda: crash_lab.requests(engine.stats_url) >= 6, "the first calls")
    children = crash_lab.until(lambda: crash_lab.kill_a_playing_worker(run), "a worker that plays")
    crash_lab.until(lambda: not alive(children), "the end of the killed worker's processes")
    crash_lab.finish(run)
    trajectories, story = crash_lab.check_whole()
    assert story.lost_attempts >= 1
    assert {len(each.turns) for each in trajectories} == {CALLS}
    made = CALLS * len(trajectories)
    assert made <= crash_lab.requests(engine.stats_url) <= made + story.lost_attempts
    crash_lab.until(lambda: not processes(f"3600.{mark}"), "the end of every command's processes")


def alive(pids: list[int]) -> list[int]:
    """Those that still run; a zombie has ended."""
    running = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            running.append(pid)
    return running
