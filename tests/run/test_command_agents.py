"""Commands as agents: what they are given, what is kept of them, and that nothing of them is left behind."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollwright.cli.main import app
from rollwright.config import build
from rollwright.errors import ConfigError
from rollwright.rollout import TooManyRefills
from rollwright.run.checks import check_config
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
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    crash_lab.until(lambda: are_gone(found), "the end of their processes")


ESCAPES = """
import os, subprocess, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:  # a daemon: neither its group nor its parent leads to the command
        with open(os.environ["PIDS"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        os.execvp("sleep", ["sleep", "3600"])
    os._exit(0)
child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
with open(os.environ["PIDS"], "a") as file:
    file.write(f"{child.pid}\\n")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are handed to the supervisor on Linux only")
def test_a_process_that_left_the_group_is_gone_too(tmp_path: Path) -> None:
    (tmp_path / "escapes.py").write_text(ESCAPES + AGENT, encoding="utf-8")
    played = asyncio.run(play(content(tmp_path, ["escapes.py"]), []))
    assert len(played) == 2
    assert len(pids(tmp_path)) == 4
    assert are_gone(pids(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are handed to the supervisor on Linux only")
def test_a_killed_worker_leaves_no_daemon_of_its_commands(crash_lab: Any, tmp_path: Path) -> None:
    hangs = "\nimport time\ntime.sleep(3600)\n"
    (tmp_path / "escapes.py").write_text(ESCAPES + hangs, encoding="utf-8")
    settings = content(tmp_path, ["escapes.py"], name="crash")
    del settings["folder"]
    crash_lab.config(**settings)
    run = crash_lab.start("run", "crash.yaml")
    found = crash_lab.until(
        lambda: len(pids(tmp_path)) >= 4 and pids(tmp_path), "two commands and their daemons"
    )
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    crash_lab.until(lambda: are_gone(found), "the end of their processes")


def test_a_killed_command_is_a_failure_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os\nos.kill(os.getpid(), 9)\n", encoding="utf-8")
    told: list[str] = []
    limits = {"max_attempts": 1, "max_refills": 1}
    with pytest.raises(TooManyRefills):
        asyncio.run(play(content(tmp_path, ["dies.py"], limits=limits), told))
    assert set(told) == {"agent: command: ended by SIGKILL"}


BUILDS_ITS_CLIENT = """
import openai
client = openai.OpenAI()  # from the environment, when it is imported

def solve(task, session):
    question = {"role": "user", "content": task["question"]}
    return client.chat.completions.create(model="m", messages=[question]).choices[0].message.content

async def solve_async(task, session):
    return solve(task, session)

def raises(task, session):
    raise LookupError("no tool\\nfor this")

def leaves(task, session):
    import os
    os._exit(3)
"""


def in_process(tmp_path: Path, function: str, **more: Any) -> dict[str, Any]:
    name = f"builds_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(BUILDS_ITS_CLIENT, encoding="utf-8")
    settings = content(tmp_path, [], **more)
    settings["custom_envs"]["Sums"]["agent"] = {"function": f"{name}:{function}", "process": True}
    return settings


@pytest.mark.parametrize("function", ["solve", "solve_async"])
def test_a_function_in_a_process_of_its_own_finds_the_model_by_its_variables(
    tmp_path: Path, function: str
) -> None:
    told: list[str] = []
    played = asyncio.run(play(in_process(tmp_path, function), told))
    assert {each.components["exact_match"] for each in played} == {1.0}, told
    assert {len(each.turns) for each in played} == {1}


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        ("raises", "agent: LookupError: no tool for this"),
        ("leaves", "agent: command: exit code 3"),
        ("nobody", "agent: AttributeError: module 'builds_"),
    ],
)
def test_what_a_function_in_its_own_process_does_wrong_is_one_line(
    tmp_path: Path, function: str, cause: str
) -> None:
    told: list[str] = []
    limits = {"max_attempts": 1, "max_refills": 1}
    with pytest.raises(TooManyRefills):
        asyncio.run(play(in_process(tmp_path, function, limits=limits), told))
    assert all(line.startswith(cause) for line in told), told


@pytest.mark.parametrize("function", ["__main__:solve", "solve", "no_such_module:solve"])
def test_a_function_that_no_other_process_can_find_is_refused(tmp_path: Path, function: str) -> None:
    settings = content(tmp_path, [])
    settings["custom_envs"]["Sums"]["agent"] = {"function": function, "process": True}
    with pytest.raises(ConfigError, match=r"custom_envs\.Sums\.agent: "):
        check_config(build(settings))
