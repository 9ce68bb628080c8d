"""A process with all its descendants, as one tree that can be killed without remainder.

Invariant: every descendant is found again by one of three marks: the process group, a variable in its environment, or,
where Linux lets this process adopt orphans (child subreaper), its new parent. `ProcessTree.kill` returns only when no
process with such a mark runs any more. The process itself gets SIGTERM when its supervisor dies (Linux).
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil

LIFE_VARIABLE = "ROLLWRIGHT_LIFE"
"""In the environment of every process that one life of a node has started."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""From Linux's `prctl.h`."""

_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
"""Opened here, because between fork and exec nothing may be loaded."""

_KILL_ROUNDS = 50
"""A process may start others while it is being killed, so killing is repeated until none is left."""

_KILL_PAUSE = 0.1
"""Seconds for the kernel to take a killed process away."""

_VMSTAT = Path("/proc/vmstat")
"""Linux's counters; psutil does not have the one of the OOM killer."""

_SUSPENDED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True)
class ProcessState:
    """A process as the kernel shows it."""

    pid: int
    parent: int
    group: int
    status: str
    """As psutil names it."""


def adopt_orphans() -> bool:
    """Make orphaned descendants children of this process from now on. False where the system cannot."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


class ProcessTree:
    """A process that was started here, and its descendants."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the command in a session of its own; stdout and stderr share one pipe."""
        self.life = uuid4().hex
        self._not_ours = {each.pid for each in psutil.Process().children()}
        supervisor = os.getpid()

        def before_exec() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != supervisor:  # it died before the request took effect
                os._exit(1)

        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environment, LIFE_VARIABLE: self.life, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            preexec_fn=before_exec,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def suspended(self) -> bool:
        with suppress(psutil.Error):
            return bool(psutil.Process(self.pid).status() in _SUSPENDED)
        return False

    def terminate(self) -> None:
        """Ask the root process alone to end: it knows in which order its descendants must go."""
        with suppress(ProcessLookupError):
            self.process.terminate()
            self.process.send_signal(signal.SIGCONT)  # a suspended process would not handle the signal

    def kill(self) -> int:
        """Kill every process of the tree that is left; return their number."""
        killed = _kill_until_none(self._left)
        self.process.wait()
        self.reap()
        return killed

    def reap(self) -> None:
        """Collect adopted children that have exited, so that they do not fill the process table."""
        for child in psutil.Process().children():
            if child.pid == self.pid or child.pid in self._not_ours:
                continue
            with suppress(ChildProcessError, psutil.Error):
                if child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)

    def _left(self) -> list[int]:
        return [
            state.pid
            for state in _running()
            if state.pid != os.getpid()
            and (state.group == self.pid or self._adopted(state) or _has_mark(state.pid, self.life))
        ]

    def _adopted(self, state: ProcessState) -> bool:
        return state.parent == os.getpid() and state.pid != self.pid and state.pid not in self._not_ours


def kill_life(life: str) -> int:
    """Kill the processes of a life whose supervisor is dead; return their number."""
    return _kill_until_none(lambda: processes_of(life))


def processes_of(life: str) -> list[int]:
    """The running processes of a life, as far as their environment shows it."""
    return [state.pid for state in _running() if _has_mark(state.pid, life)]


def memory_kills() -> int | None:
    """Processes that the kernel's OOM killer has killed since boot; `None`: the system does not tell."""
    try:
        lines = _VMSTAT.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _kill_until_none(find: Callable[[], list[int]]) -> int:
    killed: set[int] = set()
    for _ in range(_KILL_ROUNDS):
        left = find()
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed.update(left)
        if not left:
            break
        time.sleep(_KILL_PAUSE)
    return len(killed)


def _running() -> Iterator[ProcessState]:
    """All processes but zombies."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError, PermissionError):
            state = ProcessState(process.pid, process.ppid(), os.getpgid(process.pid), process.status())
            if state.status != psutil.STATUS_ZOMBIE:
                yield state


def _has_mark(pid: int, life: str) -> bool:
    try:
        return bool(psutil.Process(pid).environ().get(LIFE_VARIABLE) == life)
    except (psutil.Error, OSError):  # another user's process, or one that is gone
        return False


def _prctl(option: int, value: int) -> bool:
    return _LIBC is not None and _LIBC.prctl(option, value, 0, 0, 0) == 0
