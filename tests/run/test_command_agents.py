"""Commands as agents: what they are given, what is kept of them, and that nothing of them is left behind."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollwright.cli.main import app
from rollwright.config import build
from rollwright.rollout import TooManyRefills
from rollwright.run.folder import RunReader
from rollwright.run.run import Run
from rollwright.trajectory import Trajectory

AGENT = """
import json, os, sys, openai
task = json.load(open("task.json"))
with openai.OpenAI() as client:
    said = client.chat.completions.create(model="m", messages=[{"role": "user", "content": task["question"]}])
print("x" * 200_000)
print(os.listdir("."), file=sys.stderr)
print("in", os.getcwd())
print(said.choices[0].message.content)
"""

ANTHROPIC = """
import json, anthropic
task = json.load(open("task.json"))
with anthropic.Anthropic() as client:
    said = client.messages.create(
        model="m", max_tokens=50, messages=[{"role": "user", "content": task["question"]}]
    )
print(said.content[0].text)
"""

LEAVES_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
with open(os.environ["PIDS"], "a") as file:
    file.write(f"{os.getpid()} {child.pid}\\n")
if sys.argv[1] == "hang":
    time.sleep(3600)
print("last words", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""

LAST_WORD = {"kind": "exact_match", "extract": r"(\S+)\s*$"}


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ROLLWRIGHT_STORE_SECRET", "s3cret")
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    rows = [{"question": f"{n} + 1 = ?", "answer": n + 1} for n in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, text in (("agent.py", AGENT), ("anthropic_agent.py", ANTHROPIC), ("child.py", LEAVES_A_CHILD)):
        (tmp_path / name).write_text(text, encoding="utf-8")


def content(tmp_path: Path, words: list[str], **more: Any) -> dict[str, Any]:
    agent = {"command": [sys.executable, *words], "timeout": more.pop("timeout", 60.0), "output_kb": 1}
    return {
        "name": "sums",
        "folder": str(tmp_path),
        "custom_envs": {"Sums": {"tasks": "sums.jsonl", "agent": agent, "rewards": [LAST_WORD]}},
        "policy": {"kind": "simulated", "skill": 1.0, "tokens_per_second": 1e5, "mean_tokens": 5},
        "train_env_manager": {"num_env_groups": 1, "group_size": 2, "tags": ["Sums"]},
        **more,
    }


async def play(settings: dict[str, Any], told: list[str]) -> list[Trajectory]:
    async with Run(build(settings), on_failed=lambda rollout, reason: told.append(reason)) as run:
        return (await run.get_batch()).trajectories


def pids(tmp_path: Path) -> list[int]:
    file = tmp_path / "pids"
    return [int(each) for each in file.read_text().split()] if file.exists() else []


def are_gone(found: list[int]) -> bool:
    def is_gone(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    return all(map(is_gone, found))


def test_a_command_plays_a_task_with_the_usual_variables_and_its_output_is_kept(tmp_path: Path) -> None:
    settings = content(tmp_path, ["agent.py"])
    del settings["folder"]
    (tmp_path / "sums.yaml").write_text(json.dumps(settings), encoding="utf-8")
    runner = CliRunner()
    ran = runner.invoke(app, ["run", str(tmp_path / "sums.yaml"), "--runs", str(tmp_path / "runs")])
    assert ran.exit_code == 0, ran.output
    played = list(RunReader(tmp_path / "runs" / "sums").trajectories())
    folders = set()
    for each in played:
        returned = json.loads(each.returned or "")
        assert len(returned) <= 1024
        folders.add(next(line for line in returned.splitlines() if line.startswith("in ")))
        assert (each.components, len(each.turns)) == ({"exact_match": 1.0}, 1)
    assert len(folders) == len(played) == 2
    assert not any(Path(each.removeprefix("in ")).exists() for each in folders)
    shown = runner.invoke(app, ["show", str(tmp_path / "runs" / "sums"), played[0].rollout_id])
    assert "returned" in shown.output
    assert "in /" in shown.output


def test_the_anthropic_sdk_finds_its_way_too(tmp_path: Path) -> None:
    told: list[str] = []
    played = asyncio.run(play(content(tmp_path, ["anthropic_agent.py"]), told))
    assert {each.components["exact_match"] for each in played} == {1.0}, told


@pytest.mark.parametrize(
    ("word", "timeout", "cause"),
    [
        ("3", 60.0, "agent: command: exit code 3: last words"),
        ("hang", 1.0, "agent: timeout: the command did not end within 1 s"),
    ],
)
def test_an_exit_code_or_a_hang_is_a_failure_and_its_processes_are_gone(
    tmp_path: Path, word: str, timeout: float, cause: str
) -> None:
    told: list[str] = []
    limits = {"max_attempts": 1, "max_refills": 1}
    with pytest.raises(TooManyRefills):
        asyncio.run(play(content(tmp_path, ["child.py", word], timeout=timeout, limits=limits), told))
    assert set(told) == {cause}
    assert pids(tmp_path)
    assert are_gone(pids(tmp_path))


def test_a_command_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    settings = content(tmp_path, [], limits={"max_attempts": 1, "max_refills": 1})
    settings["custom_envs"]["Sums"]["agent"]["command"] = ["no-such-program"]
    told: list[str] = []
    with pytest.raises(TooManyRefills):
        asyncio.run(play(settings, told))
    assert "no-such-program" in told[0]


def test_a_cancelled_run_leaves_no_process(tmp_path: Path) -> None:
    async def run() -> None:
        playing = asyncio.create_task(play(content(tmp_path, ["child.py", "hang"]), []))
        while len(pids(tmp_path)) < 4:
            await asyncio.sleep(0.05)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    asyncio.run(run())
    assert are_gone(pids(tmp_path))


def test_a_killed_worker_leaves_no_process_of_its_commands(crash_lab: Any, tmp_path: Path) -> None:
    settings = content(tmp_path, ["child.py", "hang"], name="crash")
    del settings["folder"]
    crash_lab.config(**settings)
    run = crash_lab.start("run", "crash.yaml")
    found = crash_lab.until(lambda: len(pids(tmp_path)) >= 4 and pids(tmp_path), "two commands")
    time.sleep(0.5)  # each has its watcher by then
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    crash_lab.until(lambda: are_gone(found), "the end of their processes")


def test_a_process_that_left_the_group_holds_nobody_up(tmp_path: Path) -> None:
    escapes = "import subprocess, sys, json, openai\n"
    escapes += "subprocess.Popen(['sleep', '20'], start_new_session=True)\n"
    (tmp_path / "escapes.py").write_text(escapes + AGENT, encoding="utf-8")
    began = time.monotonic()
    played = asyncio.run(play(content(tmp_path, ["escapes.py"]), []))
    assert len(played) == 2
    assert time.monotonic() - began < 20  # the time that the process sleeps
