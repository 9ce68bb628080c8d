"""Client side of the sandboxes: the fork server's handle, one sandbox, and the factory that opens sandboxes.

Always true: a socket holds a sandbox, so the sandbox ends when the socket is closed or dropped, or when this process
ends for any reason. A sandbox runs one execution at a time. An execution that misses its deadline or is cancelled ends
the sandbox, because its late reply could not be told from the reply to the next execution.

The fork server starts on first use and again after it died. It serves one program, a module of this package that it
imports before it forks: it calls `prepare()` once, `reads()` names the files that a sandbox must be able to read, and
`serve(line, limits)` is the main function of a sandbox.
"""

import asyncio
import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import msgspec

from rollwright.errors import ConfigError, RollwrightError
from rollwright.sandbox.protocol import (
    LENGTH,
    ExecuteRequest,
    ExecutionResult,
    Exited,
    Ready,
    SandboxLimits,
    SandboxReply,
    StartRequest,
    frame,
)

__all__ = ["ForkServer", "Sandbox", "SandboxError", "SandboxFactory", "package_folders"]

_START_SECONDS = 60.0
"""Timeout for the first sandbox, which waits for the fork server (a third of a second on an idle machine)."""

_GRACE_SECONDS = 1.0
"""Seconds between the interruption of code and the end of its sandbox."""

_MAX_REPLY = 1 << 22
"""Bytes of one reply; a longer one means that the code took over the sandbox's process."""

_READ_SIZE = 1 << 16

AHEAD = 2
"""Sandboxes to start ahead for those who need a new one often: while one works, the next is forked and confined."""

_log = logging.getLogger(__name__)


class SandboxError(RollwrightError):
    """A sandbox is unavailable for a reason that its code did not cause."""


class ServerProcess:
    """Handle of a server process that is given sockets to serve; safe to use from any thread. The process is started on
    first use, and again after it died."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._arguments = (module, *arguments)
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def close(self) -> None:
        """Ends the server; a later request starts a new one."""
        with self._lock:
            self._end()

    def abandon(self) -> None:
        """Drops the handle in a forked child of this process; the server stays with the parent."""
        self._lock = threading.Lock()  # a thread that did not survive the fork may hold the old one
        if self._control is not None:
            self._control.close()
        self.process = self._control = None

    def _hand_over(self, send: Callable[[socket.socket], None]) -> None:
        """Calls `send` with the server's control socket, once more with that of a new server if the last one died."""
        with self._lock:
            try:
                send(self._connect())
            except OSError:
                self._end()
                send(self._connect())

    def _end(self) -> None:
        process, control = self.process, self._control
        self.process = self._control = None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()

    def _connect(self) -> socket.socket:
        if self._control is None or not self.is_running:
            self._end()
            self._control, self.process = _spawn(*self._arguments)
        assert self._control is not None
        return self._control


class ForkServer(ServerProcess):
    """Handle of the process that forks the sandboxes of one program; its sandboxes end with it."""

    def __init__(self, program: str, folders: Sequence[Path | str] = ()) -> None:
        """`folders`: directories that a sandbox may read and import from, beside the standard library."""
        # Each folder under both names: packages find their data by the given path, symbolic links point to the real one.
        places = [place for each in folders for place in (Path(each).absolute(), Path(each).resolve())]
        for each in places:
            if not each.is_dir() or each == Path("/"):
                raise ConfigError(
                    f"sandbox folders: {each} is not a folder that can be mounted; give existing folders, not /"
                )
        super().__init__("rollwright.sandbox.forkserver", program, *dict.fromkeys(map(str, places)))

    def start(self, limits: SandboxLimits, *, is_confined: bool = True) -> socket.socket:
        """Starts a sandbox and returns its socket, on which `Ready` arrives first."""
        if sys.platform != "linux":
            raise SandboxError(f"the Python sandbox needs Linux, and this is {sys.platform}")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        request = msgspec.msgpack.encode(StartRequest(limits, is_confined))
        with theirs:
            try:
                self._hand_over(lambda control: _send_file(control, request, theirs))
            except OSError as error:
                ours.close()
                raise SandboxError(f"the sandboxes' fork server cannot be started: {error}") from error
        return ours


def _send_file(control: socket.socket, request: bytes, line: socket.socket) -> None:
    socket.send_fds(control, [request], [line.fileno()])


def _spawn(module: str, *arguments: str) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    # SEQPACKET keeps message boundaries, so that each file descriptor arrives with its own request.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-m", module, *arguments],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            cwd="/",
            start_new_session=True,
        )
    return ours, process


def _environment() -> dict[str, str]:
    """Environment variables of the fork server: of this process's own, only the module path is passed on."""
    return {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in sys.path if place),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "LD_BIND_NOW": "1",  # else every sandbox would look up the functions that it calls, and copy the tables
        "MALLOC_ARENA_MAX": "1",  # each further arena reserves 64 MB of a sandbox's address space
    }


def package_folders(*packages: str) -> list[Path]:
    """Directories in which these packages and their dependencies are installed, for `ForkServer(folders=…)`."""
    places = [Path(each) for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
    for package in packages:
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            places.append(Path(spec.origin).parent.parent)
    return [each for each in dict.fromkeys(places) if each.is_dir()]


class Sandbox:
    """One confined Python process; variables persist from one execution to the next."""

    def __init__(self, line: socket.socket, limits: SandboxLimits) -> None:
        self._line = line
        self._limits = limits
        self._turn = asyncio.Lock()
        self._unread = bytearray()
        self.has_ended = False

    def is_spare(self, limits: SandboxLimits) -> bool:
        """Whether it has these limits and its process lives."""
        waiting = select.poll()
        waiting.register(self._line, 0)  # the end of the other side is always reported
        return self._limits == limits and not waiting.poll(0)

    async def run(self, code: str, seconds: float | None = None) -> ExecutionResult:
        """Executes `code`; its exception, or the end of the sandbox, is part of the result."""
        async with self._turn:
            if self.has_ended:
                raise SandboxError("the sandbox has ended")
            limit = self._limits.seconds if seconds is None else seconds
            try:
                async with asyncio.timeout(limit + _GRACE_SECONDS):
                    reply = await self._request(ExecuteRequest(code.encode(errors="replace").decode(), limit))
            except TimeoutError:
                self._end()
                return ExecutionResult(
                    "", f"TimeoutError: ended after {limit:g} s", is_late=True, has_ended=True
                )
            except BaseException:  # cancelled: the reply still to come must not answer the next execution
                self._end()
                raise
            if isinstance(reply, ExecutionResult):
                return reply
            self._end()
            return ExecutionResult("", self._explain_end(reply), has_ended=True)

    async def wait_until_ready(self) -> str:
        """Returns the isolation feature that the machine lacks; empty: the sandbox is ready."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                reply = await self._read_reply()
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
        """Ends the sandbox at once; running code is killed."""
        self.has_ended = True
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)  # also wakes a task that waits for a reply
        # A waiting `run` closes the socket itself: its descriptor number must not be reused while the loop watches it.
        if not self._turn.locked():
            self._line.close()

    def _end(self) -> None:
        self.has_ended = True
        self._line.close()

    async def _request(self, request: ExecuteRequest) -> SandboxReply | None:
        with suppress(ConnectionError):  # the process has exited; its `Exited` message may still be readable
            await asyncio.get_running_loop().sock_sendall(self._line, frame(request))
        return await self._read_reply()

    async def _read_reply(self) -> SandboxReply | None:
        """The next reply; `None`: the socket is closed, or the bytes are not a reply."""
        loop = asyncio.get_running_loop()
        while True:
            if len(self._unread) >= LENGTH.size:
                end = LENGTH.size + LENGTH.unpack_from(self._unread)[0]
                if end > _MAX_REPLY:
                    return None
                if len(self._unread) >= end:
                    body = bytes(self._unread[LENGTH.size : end])
                    del self._unread[:end]
                    break
            try:
                more = await loop.sock_recv(self._line, _READ_SIZE)
            except ConnectionError:
                return None
            if not more:
                return None
            self._unread += more
        try:
            reply: SandboxReply = msgspec.msgpack.decode(body, type=SandboxReply)
            return reply
        except (msgspec.MsgspecError, ValueError):  # ValueError: text that is not UTF-8
            return None

    def _explain_end(self, reply: SandboxReply | None) -> str:
        if isinstance(reply, Exited) and reply.signal:
            cause = f"it used more than {self._limits.cpu_seconds} s of processor time, or it crashed"
            return f"SystemError: the process was ended by signal {reply.signal}: {cause}"
        return "SystemError: the process ended"


class SandboxFactory:
    """Opens sandboxes that run Python code."""

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        folders: Sequence[Path | str] = (),
        allow_unconfined: bool = False,
        ahead: int = 0,
    ) -> None:
        """`folders`: directories that code may read and import from, beside the standard library. `allow_unconfined`:
        on a machine without namespaces, seccomp or an unprivileged user, code runs under rlimits alone. `ahead`: sandboxes
        that are kept ready from the second `open` on, each with about 1 MiB of memory."""
        self.limits = limits or SandboxLimits()
        self._fork_server = ForkServer("rollwright.sandbox.runner", folders)
        self._allow_unconfined = allow_unconfined
        self._is_confined = True
        self._ahead = ahead
        self._spares: deque[Sandbox] = deque()
        self._has_opened = False

    async def open(self, limits: SandboxLimits | None = None) -> Sandbox:
        """Starts a sandbox, with other limits than the factory's if some are given, and waits until it can run code."""
        limits = limits or self.limits
        sandbox = self._take_spare(limits) or self._start(limits)
        missing = await sandbox.wait_until_ready()
        if not missing:
            self._start_ahead(limits)
            return sandbox
        if not self._allow_unconfined:
            raise SandboxError(
                f"the Python sandbox cannot confine code on this machine; missing is {missing}; "
                "allow_unconfined=True would run it with limits only"
            )
        _log.warning("code runs with limits only; missing is %s", missing)
        self._is_confined = False
        sandbox = self._start(limits)
        if missing := await sandbox.wait_until_ready():
            raise SandboxError(f"the Python sandbox cannot run code on this machine; missing is {missing}")
        return sandbox

    def close(self) -> None:
        """Ends the fork server and all its sandboxes; a later `open` starts a new one."""
        self._drop_spares()
        self._fork_server.close()

    def _take_spare(self, limits: SandboxLimits) -> Sandbox | None:
        # Spares end with their fork server, but a moment after it.
        if self._spares and self._fork_server.is_running and self._spares[0].is_spare(limits):
            return self._spares.popleft()
        self._drop_spares()
        return None

    def _start_ahead(self, limits: SandboxLimits) -> None:
        """Starts sandboxes like the last one, if that was not the first: one alone would need no other."""
        while self._has_opened and self._is_confined and len(self._spares) < self._ahead:
            self._spares.append(self._start(limits))
        self._has_opened = True

    def _drop_spares(self) -> None:
        while self._spares:
            self._spares.pop().close()

    def _start(self, limits: SandboxLimits) -> Sandbox:
        return Sandbox(self._fork_server.start(limits, is_confined=self._is_confined), limits)
