"""The process that makes sandboxes, as seen from here: started when first needed, and again after it ended.

What runs in its sandboxes is one program, a module of this package, which that process imports before it forks:
`prepare()` is called there once, `reads()` names the files that a sandbox must be able to read, and `serve(line, limits)`
is a sandbox's whole life. A sandbox is held by the socket that `start` returns, and ends when that is closed.

Sandboxes as seen from here.

True of them: a sandbox is held by a socket, so it ends when it is closed, dropped, or when this process ends, however
that happens; one execution runs at a time; an execution that does not come back in time, or that was given up, ends
its sandbox, because nobody could tell its late answer from the next one's.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from rollwright.errors import ConfigError, RollwrightError
from rollwright.sandbox.protocol import LENGTH, Ended, Ran, Ready, Reply, Run, SandboxLimits, Start, frame


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
            [sys.executable, "-s", "-P", "-m", "rollwright.sandbox.forkserver", program],
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


__all__ = ["Nursery", "Sandbox", "SandboxError"]

_START_SECONDS = 60.0
"""For the first sandbox, whose nursery has to start (a third of a second on an idle machine)."""

_GRACE_SECONDS = 1.0
"""Between interrupting code and ending its sandbox."""

_MAX_REPLY = 1 << 22
"""Bytes: a sandbox that says more at once is not what it was."""

_log = logging.getLogger(__name__)


class Sandbox:
    """One locked-in Python process; names live from one execution to the next."""

    def __init__(self, line: socket.socket, limits: SandboxLimits) -> None:
        self._line = line
        self._limits = limits
        self._turn = asyncio.Lock()
        self.has_ended = False

    async def run(self, code: str, seconds: float | None = None) -> Ran:
        """Executes `code`; what it raises, and its end, are part of the answer."""
        async with self._turn:
            if self.has_ended:
                raise SandboxError("the sandbox has ended")
            limit = self._limits.seconds if seconds is None else seconds
            try:
                async with asyncio.timeout(limit + _GRACE_SECONDS):
                    reply = await self._asked(Run(code.encode(errors="replace").decode(), limit))
            except TimeoutError:
                self._end()
                return Ran("", f"TimeoutError: ended after {limit:g} s", is_late=True, has_ended=True)
            except BaseException:
                self._end()
                raise
            if isinstance(reply, Ran):
                return reply
            self._end()
            return Ran("", self._why(reply), has_ended=True)

    async def wait_until_ready(self) -> str:
        """What the machine cannot give; empty: the sandbox is ready."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                reply = await self._reply()
        except TimeoutError:
            reply = None
        except BaseException:
            self._end()
            raise
        if isinstance(reply, Ready) and not reply.missing:
            return ""
        self._end()
        if isinstance(reply, Ready):
            return reply.missing
        raise SandboxError("a sandbox did not start, or ended before it was ready")

    def close(self) -> None:
        """At once; code that runs is killed."""
        self.has_ended = True
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)  # also wakes whoever waits for an answer
        if not self._turn.locked():
            self._line.close()

    def _end(self) -> None:
        self.has_ended = True
        self._line.close()

    async def _asked(self, request: Run) -> Reply | None:
        with suppress(ConnectionError):  # it has ended; its last word may still be there
            await asyncio.get_running_loop().sock_sendall(self._line, frame(request))
        return await self._reply()

    async def _reply(self) -> Reply | None:
        """`None`: the line is dead, or what came makes no sense."""
        head = await self._read(LENGTH.size)
        if head is None or (length := LENGTH.unpack(head)[0]) > _MAX_REPLY:
            return None
        body = await self._read(length)
        try:
            return None if body is None else msgspec.msgpack.decode(body, type=Reply)
        except (msgspec.MsgspecError, ValueError):  # also text that is not UTF-8
            return None

    async def _read(self, count: int) -> bytes | None:
        data = bytearray()
        loop = asyncio.get_running_loop()
        while len(data) < count:
            try:
                more = await loop.sock_recv(self._line, count - len(data))
            except ConnectionError:
                return None
            if not more:
                return None
            data += more
        return bytes(data)

    def _why(self, reply: Reply | None) -> str:
        if isinstance(reply, Ended) and reply.signal:
            used = f"more than {self._limits.cpu_seconds} s of processor time were used, or it crashed"
            return f"SystemError: the process was ended by signal {reply.signal}: {used}"
        return "SystemError: the process ended"


class Nursery:
    """Where sandboxes for code come from."""

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        folders: Sequence[Path | str] = (),
        allow_unconfined: bool = False,
    ) -> None:
        """`folders` are what code may read and import from beside the standard library. `allow_unconfined`: where the
        machine cannot give namespaces, a filter and an unprivileged user, limits alone have to do."""
        self.limits = limits or SandboxLimits()
        self._starter = SandboxStarter("rollwright.sandbox.runner", folders)
        self._allow_unconfined = allow_unconfined
        self._is_confined = True

    async def open(self) -> Sandbox:
        """A new sandbox, ready to run code."""
        sandbox = self._started()
        missing = await sandbox.wait_until_ready()
        if not missing:
            return sandbox
        if not self._allow_unconfined:
            raise SandboxError(
                f"the Python sandbox cannot lock code in on this machine; missing is {missing}; "
                "allow_unconfined=True would run it with limits only"
            )
        _log.warning("code runs with limits only; missing is %s", missing)
        self._is_confined = False
        sandbox = self._started()
        if missing := await sandbox.wait_until_ready():
            raise SandboxError(f"the Python sandbox cannot run code on this machine; missing is {missing}")
        return sandbox

    def close(self) -> None:
        """Ends the process and all its sandboxes; a later `open` starts a new one."""
        self._starter.close()

    def _started(self) -> Sandbox:
        return Sandbox(self._starter.start(self.limits, is_confined=self._is_confined), self.limits)
