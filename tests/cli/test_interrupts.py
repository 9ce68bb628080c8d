"""Ctrl-C and SIGTERM at any moment: one line, the right exit code, never a traceback."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from rollwright.rng import uniform
from rollwright.run.folder import RunReader

PATIENCE = 60.0

CONFIG = {
    "name": "slow",
    "max_steps": 1000,
    "policy": {"kind": "simulated", "slots": 4, "tokens_per_second": 400},
    "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["FrozenLake"]},
}

BEGIN = """
from rollwright.cli.entry import main
from rollwright.signals import INTERRUPTS

INTERRUPTS.install()  # `main` does so, too, as the first thing
print("up", flush=True)
main()
"""
"""What the `rollwright` script does; its first line says that the interpreter itself has started."""


def started(folder: Path, *words: str) -> "subprocess.Popen[str]":
    (folder / "slow.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def ended(process: "subprocess.Popen[str]", code: int) -> str:
    """Checks how it ended; gives what it said."""
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert "Exception" not in errors
    assert len(errors.splitlines()) <= 1, errors
    assert "interrupted" in output + errors or "terminated" in errors
    return output + errors


def startup_seconds(folder: Path) -> float:
    """How long it takes until the run has begun to play, on this machine, now."""
    began = time.monotonic()
    process = started(folder, "run", "slow.yaml", "--no-live", "name=timed")
    metrics = folder / "runs" / "timed" / "metrics.jsonl"
    while not metrics.exists() and time.monotonic() - began < PATIENCE:
        time.sleep(0.01)
    taken = time.monotonic() - began
    process.kill()
    process.communicate()
    return taken


def test_ctrl_c_at_any_moment_ends_with_one_line_and_130(tmp_path: Path) -> None:
    whole = startup_seconds(tmp_path)
    for number in range(9):
        process = started(tmp_path, "run", "slow.yaml", "--no-live", f"name=n{number}")
        time.sleep(uniform("ctrl-c", number) * 1.3 * whole)
        process.send_signal(signal.SIGINT)
        ended(process, 130)


def test_sigterm_ends_like_ctrl_c_with_143(tmp_path: Path) -> None:
    process = started(tmp_path, "run", "slow.yaml", "--no-live")
    process.send_signal(signal.SIGTERM)
    ended(process, 143)
    process = started(tmp_path, "run", "slow.yaml", "--no-live")
    metrics = tmp_path / "runs" / "slow" / "metrics.jsonl"
    while not metrics.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    ended(process, 143)
    summary = RunReader(tmp_path / "runs" / "slow").summary()
    assert summary is not None
    assert summary["interrupted"] is True


STUBBORN = """
import asyncio, os
from pathlib import Path
from rollwright.envs.games.frozen_lake import FrozenLake

class Stubborn(FrozenLake):
    async def step(self, answer):
        Path("playing").touch()
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                Path("cancelled").touch()
"""


def test_a_second_ctrl_c_ends_at_once_what_does_not_end_by_itself(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN, encoding="utf-8")
    manager = {"num_env_groups": 1, "tags": ["stubborn:Stubborn"]}
    (tmp_path / "stubborn.yaml").write_text(
        yaml.safe_dump({**CONFIG, "train_env_manager": manager}), encoding="utf-8"
    )
    process = started(tmp_path, "run", "stubborn.yaml", "--no-live")
    for file in ("playing", "cancelled"):
        while not (tmp_path / file).exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
    ended(process, 130)


BUSY = """
import time
from pathlib import Path
from rollwright.envs.games.frozen_lake import FrozenLake

class Busy(FrozenLake):
    async def step(self, answer):
        Path("playing").touch()
        while True:
            time.sleep(0.01)
"""


def test_ctrl_c_twice_ends_a_run_whose_event_loop_is_blocked(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(BUSY, encoding="utf-8")
    manager = {"num_env_groups": 1, "tags": ["busy:Busy"]}
    (tmp_path / "busy.yaml").write_text(
        yaml.safe_dump({**CONFIG, "train_env_manager": manager}), encoding="utf-8"
    )
    process = started(tmp_path, "run", "busy.yaml", "--no-live")
    while not (tmp_path / "playing").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)  # two signals at the same moment count as one
    process.send_signal(signal.SIGINT)
    ended(process, 130)


CANCELS = """
import asyncio
from rollwright.envs.games.frozen_lake import FrozenLake

class Cancels(FrozenLake):
    async def step(self, answer):
        for task in asyncio.all_tasks():
            task.cancel()
        return await super().step(answer)
"""


def test_code_that_cancels_the_command_itself_is_an_error_and_no_interrupt(tmp_path: Path) -> None:
    (tmp_path / "cancels.py").write_text(CANCELS, encoding="utf-8")
    manager = {"num_env_groups": 1, "tags": ["cancels:Cancels"]}
    (tmp_path / "cancels.yaml").write_text(
        yaml.safe_dump({**CONFIG, "train_env_manager": manager}), encoding="utf-8"
    )
    process = started(tmp_path, "run", "cancels.yaml", "--no-live")
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, errors
    assert errors.splitlines()[-1].startswith("error: the command was ended by code that it plays")
    assert "Traceback" not in errors


SPAWNS = """
import asyncio
from rollwright.envs.games.frozen_lake import FrozenLake

class Spawns(FrozenLake):
    async def step(self, answer):
        async def leave():
            raise SystemExit(0)
        asyncio.ensure_future(leave())
        await asyncio.sleep(5)
"""


def test_a_task_of_played_code_that_exits_ends_the_run_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS, encoding="utf-8")
    manager = {"num_env_groups": 1, "tags": ["spawns:Spawns"]}
    (tmp_path / "spawns.yaml").write_text(
        yaml.safe_dump({**CONFIG, "train_env_manager": manager}), encoding="utf-8"
    )
    process = started(tmp_path, "run", "spawns.yaml", "--no-live")
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, errors
    assert errors.splitlines()[-1].startswith("error: a task that an episode's code has started raised")


def test_output_that_nobody_reads_ends_a_command_without_a_word(tmp_path: Path) -> None:
    process = started(tmp_path, "run", "slow.yaml", "--no-live", "max_steps=1")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert "error:" not in process.stderr.read()
    process.stderr.close()
    process.wait(PATIENCE)
