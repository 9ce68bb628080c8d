"""The process that makes sandboxes, as seen from here: started when first needed, and again after it ended.

What runs in its sandboxes is one program, a module of this package, which that process imports before it forks:
`prepare()` is called there once, `reads()` names the files that a sandbox must be able to read, and `serve(line, limits)`
is a sandbox's whole life. A sandbox is held by the socket that `start` returns, and ends when that is closed.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollwright.errors import ConfigError, RollwrightError
from rollwright.sandbox.limits import SandboxLimits
from rollwright.sandbox.messages import Start


class SandboxError(RollwrightError):
    """A sandbox cannot be had, for a reason that is not its code's doing."""


class SandboxStarter:
    """Starts sandboxes of one program; any thread may."""

    def __init__(self, program: str, folders: Sequence[Path | str] = ()) -> None:
        """`folders` are what a sandbox may read and import from beside the standard library."""
        places = [place for each in folders for place in (Path(each).absolute(), Path(each).resolve())]
        for (
            each
        ) in places:  # under both names: packages find their data by the one, and links lead to the other
            if not each.is_dir() or each == Path("/"):
                raise ConfigError(
                    f"sandbox folders: {each} is not a folder that can be shown; give existing ones"
                )
        self._program = program
        self._folders = tuple(dict.fromkeys(map(str, places)))
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self, limits: SandboxLimits, *, is_confined: bool = True) -> socket.socket:
        """The line to a new sandbox, whose first word is `Ready`."""
        if sys.platform != "linux":
            raise SandboxError(f"the Python sandbox needs Linux, and this is {sys.platform}")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        request = Start(limits, self._folders, is_confined)
        with theirs, self._lock:
            try:
                self._send(request, theirs)
            except OSError:  # it has died since
                self._end()
                try:
                    self._send(request, theirs)
                except OSError as error:
                    ours.close()
                    raise SandboxError(f"the sandboxes' process cannot be started: {error}") from error
        return ours

    def close(self) -> None:
        """Ends the process and all its sandboxes; a later `start` starts a new one."""
        with self._lock:
            self._end()

    def abandon(self) -> None:
        """In a forked copy of this process: lets go of what belongs to the original, and touches nothing."""
        self._lock = threading.Lock()
        if self._control is not None:
            self._control.close()
        self.process = self._control = None

    def _end(self) -> None:
        process, control = self.process, self._control
        self.process = self._control = None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()

    def _send(self, request: Start, line: socket.socket) -> None:
        if self._control is None or self.process is None or self.process.poll() is not None:
            self._end()
            self._control, self.process = _spawned(self._program)
        socket.send_fds(self._control, [msgspec.msgpack.encode(request)], [line.fileno()])


def _spawned(program: str) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-m", "rollwright.sandbox.nursery", program],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            cwd="/",
            start_new_session=True,
        )
    return ours, process


def _environment() -> dict[str, str]:
    """All that sandboxes get to know of this process's environment: where modules are."""
    return {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in sys.path if place),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",  # each would take 64 MB of a sandbox's address space
    }
