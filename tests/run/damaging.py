"""Runs to damage: made once, killed or ended; damage at a place drawn by seed; commands in this very process."""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import yaml

from rollwright.cli.main import main
from rollwright.run.folder import RunReader

STEPS = 6

CONFIG: dict[str, Any] = {
    "name": "lake",
    "max_steps": STEPS,
    "rollout_batch_size": 8,
    "async_generation_ratio": 1,
    "eval_steps": 2,
    "policy": {"kind": "simulated", "skill": 0.8, "tokens_per_second": 4000.0},
    "train_env_manager": {
        "num_env_groups": 4,
        "group_size": 4,
        "group_size_redundancy": 1,
        "tags": ["FrozenLake"],
    },
    "val_env_manager": {"num_env_groups": 4, "tags": ["FrozenLake"]},
}

SECONDS = 120
"""For one command: it takes less than one, and a machine may be busy."""


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def all(self) -> str:
        return " ".join((self.out + " " + self.err).split())


class Hangs(BaseException):
    """Not an `Exception`, so that nobody takes it for a failure of their own."""


@contextmanager
def time_limit() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def rollwright(*arguments: str) -> Said:
    """Runs the command in this process; whatever is no exit is a defect, and raised."""
    out, err = StringIO(), StringIO()
    code = 0
    with (
        patch.object(sys, "argv", ["rollwright", *arguments]),
        redirect_stdout(out),
        redirect_stderr(err),
        time_limit(),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Said(code, out.getvalue(), err.getvalue())


def killed_run(place: Path, **changes: Any) -> Path:
    """One that was killed when two batches were handed out; its store has a write-ahead log."""
    config = place / "config.yaml"
    config.write_text(yaml.safe_dump({**CONFIG, **changes}), encoding="utf-8")
    run = place / "runs" / "lake"
    command = [
        sys.executable,
        "-m",
        "rollwright",
        "run",
        str(config),
        "--runs",
        str(place / "runs"),
        "--no-live",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    give_up = time.monotonic() + SECONDS
    while _lines(run / "metrics.jsonl") < 2:
        if process.poll() is not None or time.monotonic() > give_up:
            process.kill()
            raise AssertionError(f"the run did not come to its second batch: {process.communicate()[0]!r}")
        time.sleep(0.002)
    process.kill()
    process.communicate()
    return run


def settled_run(place: Path, killed: Path) -> Path:
    """One that was killed, and whose write-ahead log has gone into its store."""
    run = copied(killed, place)
    with closing(sqlite3.connect(run / "store.db")) as store:
        store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return run


def ended_run(place: Path, killed: Path) -> Path:
    run = place / "lake"
    shutil.copytree(killed, run)
    said = rollwright("resume", str(run), "--no-live")
    assert said.code == 0, said
    return run


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def files_of(run: Path) -> list[Path]:
    return sorted(each for each in run.rglob("*") if each.is_file())


def damage(file: Path, draw: random.Random) -> str:
    """Changes a byte, some bytes, cuts the file off, or removes it; says what."""
    content = bytearray(file.read_bytes())
    kind = draw.choice(["byte", "byte", "byte", "bytes", "cut", "remove", "zeros"])
    if kind == "remove" or not content:
        file.unlink()
        return f"removed {file.name}"
    place = draw.randrange(len(content))
    if kind == "byte":
        content[place] ^= draw.randrange(1, 256)
    elif kind == "bytes":
        content[place : place + 16] = draw.randbytes(len(content[place : place + 16]))
    elif kind == "zeros":
        content[place : place + 4096] = bytes(len(content[place : place + 4096]))
    else:
        del content[place:]
    file.write_bytes(bytes(content))
    return f"{kind} of {file.name} at {place}"


def played(run: Path) -> dict[str, bytes]:
    """What the log has, by rollout."""
    return {each.rollout_id: each.to_bytes() for each in RunReader(run).trajectories()}


def copied(run: Path, place: Path) -> Path:
    copy = place / run.name
    shutil.copytree(run, copy)
    for file in files_of(copy):
        os.utime(file)
    return copy
