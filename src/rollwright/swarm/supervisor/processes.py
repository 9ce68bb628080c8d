"""A process with all that it starts, as one thing that can be ended without remainder.

True of it: whatever the process started is found again, by any of three marks: its process group, a variable in its
environment, or, where Linux lets this process adopt orphans, having become a child of this one. `end` returns only
when nothing with such a mark runs any more. The process itself is told to end when its supervisor dies.
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

LIFE_VARIABLE = "ROLLWRIGHT_LIFE"
"""In the environment of everything that one life has started."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""From Linux's `prctl.h`."""

_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
"""Opened here, because between fork and exec nothing may be loaded."""

_KILL_ROUNDS = 50
"""A process may start others while it is being killed, so this is done again until nothing is left."""

_KILL_PAUSE = 0.1
"""Seconds for the kernel to take a killed process away."""

_PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessState:
    """What the kernel tells of a process."""

    pid: int
    parent: int
    group: int
    letter: str
    """R, S, D: it lives; T: it is suspended; Z: it has ended and waits for its parent."""


def adopt_orphans() -> bool:
    """From now on, what loses its parent below this process becomes its child. False where the system cannot."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


class ProcessTree:
    """A process that was started here, and all that came of it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """In a session of its own; both outputs come through one pipe, `output`."""
        self.life = uuid4().hex
        self._not_ours = {state.pid for state in _states() if state.parent == os.getpid()}
        supervisor = os.getpid()

        def before() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != supervisor:  # it died before the wish was heard
                os._exit(1)

        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environment, LIFE_VARIABLE: self.life, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            preexec_fn=before,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def suspended(self) -> bool:
        state = state_of(self.pid)
        return state is not None and state.letter in "Tt"

    def ask_to_end(self) -> None:
        """Asks the process alone: it knows in which order what it started must go."""
        with suppress(ProcessLookupError):
            self.process.terminate()
            self.process.send_signal(signal.SIGCONT)  # a suspended one would not hear it

    def end(self) -> int:
        """Kills whatever is left; returns how many processes that were."""
        ended = _kill_until_none(self._left)
        if not _PROC.is_dir():  # nothing to look into: the group is all that can be named
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        self.reap()
        return ended

    def reap(self) -> None:
        """Takes away adopted children that have ended, so that they do not fill the table of processes."""
        for state in _states():
            if self._adopted(state) and state.letter == "Z":
                with suppress(ChildProcessError):
                    os.waitpid(state.pid, os.WNOHANG)

    def _left(self) -> list[int]:
        return [
            state.pid
            for state in _states()
            if state.letter != "Z"
            and state.pid != os.getpid()
            and (state.group == self.pid or self._adopted(state) or _bears(state.pid, self.life))
        ]

    def _adopted(self, state: ProcessState) -> bool:
        return state.parent == os.getpid() and state.pid != self.pid and state.pid not in self._not_ours


def kill_life(life: str) -> int:
    """Kills what is left of a life that another supervisor, now dead, has started."""
    return _kill_until_none(lambda: processes_of(life))


def processes_of(life: str) -> list[int]:
    """What runs of a life, as far as its environment shows it."""
    return [state.pid for state in _states() if state.letter != "Z" and _bears(state.pid, life)]


def state_of(pid: int) -> ProcessState | None:
    """`None`: there is no such process, or the system does not tell."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    letter, parent, group = text.rpartition(")")[2].split()[:3]  # a name may hold blanks and brackets
    return ProcessState(pid, int(parent), int(group), letter)


def memory_kills() -> int | None:
    """How many processes the kernel has killed for want of memory since it started; `None`: it does not tell."""
    try:
        lines = (_PROC / "vmstat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _kill_until_none(find: Callable[[], list[int]]) -> int:
    ended: set[int] = set()
    for _ in range(_KILL_ROUNDS):
        left = find()
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended.update(left)
        if not left:
            break
        time.sleep(_KILL_PAUSE)
    return len(ended)


def _bears(pid: int, life: str) -> bool:
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return f"{LIFE_VARIABLE}={life}".encode() in environment.split(b"\0")


def _states() -> Iterator[ProcessState]:
    if not _PROC.is_dir():
        return
    for entry in os.scandir(_PROC):
        if entry.name.isdigit() and (state := state_of(int(entry.name))) is not None:
            yield state


def _prctl(option: int, value: int) -> bool:
    return _LIBC is not None and _LIBC.prctl(option, value, 0, 0, 0) == 0
