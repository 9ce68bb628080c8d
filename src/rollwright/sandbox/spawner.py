"""The spawner: forks confined sandboxes, ends each when its client closes it, and reports how each exited.

It is the first process of a PID namespace, in the root of its sandboxes, and prepares ahead what costs the kernel most:
network and IPC namespaces, which it keeps for the next sandbox when one has ended. Each live sandbox has a pair of its own.
A sandbox leaves nothing in them, because it can make neither a socket with a name nor a shared-memory segment (see
`rollwright.sandbox.seccomp`). PID and mount namespace, user namespace and files are new in every sandbox.

Always true: a sandbox keeps no open file beside its socket, so none of another sandbox, of this process or of `/proc`.
"""

import ctypes
import os
import platform
import resource
import select
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

import msgspec

from rollwright.sandbox.isolation import (
    NEW_IPC,
    NEW_MOUNTS,
    NEW_NETWORK,
    NEW_PIDS,
    HiddenFolders,
    IsolationError,
    SeccompFilter,
    Step,
    build_root,
    confine,
    confinement,
    libc,
    limit_steps,
    mount_own_folder,
    quiet_fork,
    set_namespace,
    set_parent_death_signal,
    standard_library,
    tmpfs_options,
    unshare,
)
from rollwright.sandbox.protocol import (
    Exited,
    Ready,
    SandboxLimits,
    StartRequest,
    frame,
    rlimits_of,
)
from rollwright.sandbox.seccomp import SANDBOX_RULES, compile_filter

LINE = 3
"""File descriptor of a sandbox's socket: its only open file beside the three standard ones."""

_PROC = 4
"""File descriptor of `/proc` in a sandbox that is being confined."""

_MAX_FILE = 1 << 20
"""Above every file descriptor of this process."""

_READY = frame(Ready())

_MAX_START = 1 << 16
"""Largest size of a `StartRequest`, in bytes."""

_FILE_NUMBER = struct.Struct("i")
_ONE_FILE = socket.CMSG_SPACE(_FILE_NUMBER.size)
"""Size of the control data that carries one file descriptor."""

_MAX_PLANS = 256
"""Starts after which plans are made anew: this process's own size, which they rest on, changes little and slowly."""

_SIGKILL = int(signal.SIGKILL)

_FILES_PER_SANDBOX = 4
"""Descriptors of this process for each sandbox: its socket, its process and two namespaces."""

_SPARE_FILES = 32
"""Descriptors that stay free, for everything else that this process opens."""

_MAX_FREE_SPACES = 256
"""Pairs of namespaces that are kept for later sandboxes; each takes the kernel about 100 KiB."""


class ConfinedProgram(Protocol):
    """The part of a sandbox program that a confined process uses."""

    def reads(self) -> list[Path]: ...

    def serve(self, line: int, limits: SandboxLimits) -> None: ...


class _Spaces(NamedTuple):
    """Open files of a network and an IPC namespace."""

    network: int
    ipc: int


class _Plan(NamedTuple):
    """What a request asks for, as the calls that start a sandbox take it."""

    limits: SandboxLimits
    steps: Sequence[Step]
    """Those that confine it."""
    tmpfs: bytes
    """Options of the mount of its own folder."""


class _Running(NamedTuple):
    """A sandbox that has not exited."""

    pid: int
    process: int
    """File descriptor of the process."""
    line: int
    spaces: _Spaces


def receive_start(control: socket.socket) -> tuple[StartRequest | None, int]:
    """The next request and its socket; `None`: the client has closed the connection."""
    body, line = _receive(control)
    return (msgspec.msgpack.decode(body, type=StartRequest), line) if body else (None, -1)


def _receive(control: socket.socket) -> tuple[bytes, int]:
    body, carried, _, _ = control.recvmsg(_MAX_START, _ONE_FILE)
    return (body, _FILE_NUMBER.unpack(carried[0][2])[0]) if body else (b"", -1)


def keep_only_line(line: int) -> None:
    """Makes `line` the descriptor `LINE` and closes all others but the standard ones."""
    os.dup2(line, LINE)
    os.closerange(LINE + 1, _MAX_FILE)


class Spawner:
    """Forks the sandboxes of one program."""

    def __init__(self, control: socket.socket, program: ConfinedProgram) -> None:
        self._control = control
        self._program = program
        self._hidden: HiddenFolders = []
        self._proc = -1
        self._statm = -1
        self._own_pids = self._own_mounts = -1
        self._free: list[_Spaces] = []
        self._processes: dict[int, _Running] = {}
        """Sandboxes that have not been reaped, by the descriptor of the process."""
        self._lines: dict[int, _Running] = {}
        """Those of them that have not been killed, by the descriptor of the socket."""
        self._most = 0
        self._plans: dict[bytes, _Plan] = {}
        """By the request's own bytes: most requests ask for the same."""
        self._planned = 0

    def run(self, folders: list[Path]) -> None:
        """Serves the control socket until the client closes it."""
        self.prepare(folders)
        self._poll = select.epoll()
        control = self._control.fileno()
        self._poll.register(control, select.EPOLLIN)
        while True:
            for file, _ in self._poll.poll():
                if file == control:
                    body, line = _receive(self._control)
                    if not body:
                        return
                    self._start(body, line)
                elif (sandbox := self._lines.get(file)) is not None:
                    self._kill(sandbox)
                elif (sandbox := self._processes.get(file)) is not None:
                    self._reap(sandbox)

    def prepare(self, folders: list[Path]) -> None:
        """Makes the sandboxes' root, and all else that can be made ahead."""
        set_parent_death_signal()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._most = min(hard, _MAX_FILE) // _FILES_PER_SANDBOX - _SPARE_FILES
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        self._statm = os.open("self/statm", os.O_RDONLY, dir_fd=self._proc)
        self._own_pids = os.open("self/ns/pid", os.O_RDONLY, dir_fd=self._proc)
        needed = list(map(str, (standard_library() / "os.py", *self._program.reads())))
        if (filter_code := compile_filter(SANDBOX_RULES)) is None:
            raise IsolationError(f"a system-call filter for {platform.machine()}")
        self._filter = SeccompFilter(filter_code)
        self._before, self._after = confinement(needed, self._filter, _PROC)
        self._fork_call, self._socket_call = quiet_fork(), libc().socket
        self._files: tuple[Step, ...] = (
            ("/proc", os.dup2, (self._proc, _PROC)),  # whatever is there, also `line`, is not needed any more
            ("own files", os.closerange, (_PROC + 1, _MAX_FILE)),
        )
        self._hidden = build_root(folders)
        self._own_mounts = os.open("self/ns/mnt", os.O_RDONLY, dir_fd=self._proc)

    def _start(self, body: bytes, line: int) -> None:
        try:
            if len(self._processes) >= self._most:
                raise IsolationError(f"a free file descriptor: {self._most} sandboxes run already")
            plan = self._plan(body)
            spaces = self._enter_spaces()
            pid = self._fork(plan, line)
        except (OSError, IsolationError) as error:
            with suppress(OSError):
                os.write(line, frame(Ready(str(error))))
            os.close(line)
            return
        process = os.pidfd_open(pid)
        self._processes[process] = self._lines[line] = _Running(pid, process, line, spaces)
        self._poll.register(process, select.EPOLLIN)
        self._poll.register(line, select.EPOLLRDHUP)

    def _plan(self, body: bytes) -> _Plan:
        self._planned += 1
        if self._planned % _MAX_PLANS == 0:
            self._plans.clear()
        if body not in self._plans:
            limits = msgspec.msgpack.decode(body, type=StartRequest).limits
            used = int(os.pread(self._statm, 256, 0).split()[0]) * resource.getpagesize()
            steps = (*self._before, *limit_steps(rlimits_of(limits, used)), *self._after)
            self._plans[body] = _Plan(limits, steps, tmpfs_options(limits.disk, 0o777))
        return self._plans[body]

    def _fork(self, plan: _Plan, line: int) -> int:
        """Forks a sandbox as the first process of a new PID namespace, in a mount namespace of its own. This process makes
        them: it keeps the memory that it writes to, and a new sandbox would have to copy it."""
        steps: list[Step] = [("a socket", os.dup2, (line, LINE)), *self._files, *plan.steps]
        limits, fork, connect, serve = plan.limits, self._fork_call, self._socket_call, self._program.serve
        mount_own_folder(plan.tmpfs, self._hidden)
        try:
            unshare(NEW_PIDS)
            pid = fork()
            if pid == 0:
                _confine_and_serve(steps, limits, fork, connect, serve)
            if pid < 0:
                number = ctypes.get_errno()
                raise OSError(number, f"fork: {os.strerror(number)}")
        finally:
            set_namespace(self._own_mounts, NEW_MOUNTS)
            set_namespace(self._own_pids, NEW_PIDS)  # else the next `unshare` would be refused
        return pid

    def _enter_spaces(self) -> _Spaces:
        """Moves this process, and so its next child, to network and IPC namespaces that no live sandbox uses."""
        if self._free:
            spaces = self._free.pop()
            set_namespace(spaces.network, NEW_NETWORK)
            set_namespace(spaces.ipc, NEW_IPC)
            return spaces
        unshare(NEW_NETWORK | NEW_IPC)
        names = ("self/ns/net", "self/ns/ipc")
        return _Spaces(*(os.open(each, os.O_RDONLY, dir_fd=self._proc) for each in names))

    def _kill(self, sandbox: _Running) -> None:
        """Kills a sandbox that its client has closed. It exits while this process goes on."""
        os.kill(sandbox.pid, _SIGKILL)
        self._close_line(sandbox)

    def _reap(self, sandbox: _Running) -> None:
        """Takes leave of a sandbox that has exited, and tells its client how, if that still listens."""
        _, status = os.waitpid(sandbox.pid, 0)
        if self._lines.get(sandbox.line) is sandbox:  # the number may be another sandbox's by now
            exited = Exited(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)
            with suppress(OSError):  # the client may close it meanwhile
                os.write(sandbox.line, frame(exited))
            self._close_line(sandbox)
        del self._processes[sandbox.process]
        self._poll.unregister(sandbox.process)
        os.close(sandbox.process)
        if len(self._free) < _MAX_FREE_SPACES:
            self._free.append(sandbox.spaces)
        else:
            for file in sandbox.spaces:
                os.close(file)

    def _close_line(self, sandbox: _Running) -> None:
        del self._lines[sandbox.line]
        self._poll.unregister(sandbox.line)
        os.close(sandbox.line)


def _confine_and_serve(
    steps: Sequence[Step],
    limits: SandboxLimits,
    fork: Callable[[], int],
    connect: Callable[[int, int, int], int],
    serve: Callable[[int, SandboxLimits], None],
) -> NoReturn:
    """Confines this process and serves requests until the socket closes."""
    try:
        confine(steps, connect, fork)
        os.write(LINE, _READY)
        serve(LINE, limits)
    except IsolationError as missing:
        os.write(LINE, frame(Ready(str(missing))))
    finally:
        os._exit(0)
