"""Supervisors in processes of their own, over nodes that are small scripts: they beat, and then do what is asked."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollwright.swarm.supervisor.record import SupervisorRecord, SupervisorState, read_record

PATIENCE = 60.0
"""Seconds for anything here; it takes far less, but the machine may be busy."""

NODE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from rollwright.swarm.heartbeat import NodePhase, Pulse, read_heartbeat

home = Path(sys.argv[1])
pulse = Pulse(home)
earlier = read_heartbeat(home)
done = 0 if earlier is None else earlier.rounds_done
life = int((home / "lives").read_text()) + 1 if (home / "lives").exists() else 1
(home / "lives").write_text(str(life))
with (home / "arguments").open("a") as file:
    print(*sys.argv[2:], file=file)

def finish_a_round():
    global done
    done += 1
    pulse.enter(NodePhase.CHECKPOINT, done, done)

print("life", life, flush=True)
"""

SUPERVISE = """
import sys
from pathlib import Path
from rollwright.swarm.supervisor.rules import RestartRules
from rollwright.swarm.supervisor.supervisor import Supervision, Supervisor
from rollwright.swarm.supervisor.rules import WatchRules

home = Path(sys.argv[1])
sys.exit(Supervisor(Supervision(
    command=[sys.executable, str(home / "node.py"), str(home)],
    home=home,
    look_seconds=0.05,
    {more}
)).run())
"""

QUICK = "restarts=RestartRules(first_delay=0.05, max_delay=0.2, max_fruitless=3)"
NO_MEMORY_KILLS = "count_memory_kills=lambda: 0"
"""Other tests on this machine may have processes killed for want of memory, which the kernel counts together."""


class Watched:
    """A running supervisor."""

    def __init__(self, home: Path, process: "subprocess.Popen[str]") -> None:
        self.home = home
        self.process = process

    @property
    def record(self) -> SupervisorRecord:
        found = read_record(self.home)
        assert found is not None
        return found

    @property
    def log(self) -> str:
        return (self.home / "logs" / "node.log").read_text(encoding="utf-8")

    @property
    def lives(self) -> int:
        file = self.home / "lives"
        return int(file.read_text() or 0) if file.exists() else 0

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def until_beating(self) -> int:
        """The process of a node that has begun."""
        self.until(lambda: (self.home / "lives").exists() and self.record.state is SupervisorState.RUNNING)
        self.until(lambda: (self.home / "heartbeat.json").exists())
        assert self.record.node_pid is not None
        return self.record.node_pid


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Starts a supervisor over a node that does `what` after its first lines."""
    started: list[Watched] = []

    def start(what: str, more: str = QUICK) -> Watched:
        (tmp_path / "node.py").write_text(NODE + textwrap.dedent(what))
        process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISE.format(more=more), str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Watched(tmp_path, process))
        return started[-1]

    yield start
    for each in started:
        each.process.terminate()
        try:
            each.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            each.process.kill()
        assert each.process.stderr is not None
        each.process.stderr.close()
