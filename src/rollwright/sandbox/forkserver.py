"""The fork server: forks sandboxes in milliseconds, because a child imports nothing again.

Its first argument names the program of its sandboxes (see `rollwright.sandbox.client`). Its standard input is a socket;
each message there carries the file descriptor of another socket, for one new sandbox. A sandbox is two processes: a
monitor, which waits, and a confined worker, which runs the program.

Always true: no process outlives its client. When the client closes the sandbox's socket, or dies, the monitor exits; when
a monitor exits, the kernel kills its worker and every process in its namespaces; when the fork server exits, so do the
monitors. The fork server therefore keeps no table of sandboxes.
"""

import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Protocol, cast

import msgspec

from rollwright.sandbox import isolation
from rollwright.sandbox.isolation import (
    WORK,
    IsolationError,
    confine,
    enter_namespaces,
    limit_without_namespaces,
    standard_library,
)
from rollwright.sandbox.protocol import Exited, Ready, SandboxLimits, StartRequest, frame
from rollwright.sandbox.seccomp import SANDBOX_RULES, compile_filter

MAX_START = 1 << 16
"""Largest size of a `StartRequest`, in bytes."""

_LINE = 3
"""File descriptor of a sandbox's socket: its only open file beside the three standard ones."""

_MAX_FILE = 4096
"""Upper bound of the fork server's file descriptors."""


class SandboxProgram(Protocol):
    """Functions that the module of a sandbox program defines; see `rollwright.sandbox.client`."""

    def prepare(self) -> None: ...

    def reads(self) -> list[Path]: ...

    def serve(self, line: int, limits: SandboxLimits) -> None: ...


def main() -> None:
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    os.close(nothing)
    # A sandbox's root is built from new directories, which the unprivileged worker must be able to enter.
    os.umask(0o022)
    program = _import_program(sys.argv[1])
    compile_filter(SANDBOX_RULES)  # caches the filter, so that every fork inherits it
    library = standard_library()
    sys.path[:] = map(str, (library, library / "lib-dynload"))
    os.environ.clear()
    os.environ["HOME"] = str(WORK)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps monitors that exited
    gc.collect()
    gc.freeze()  # the collector would otherwise write to, and so copy, pages that forks share
    while True:
        body, files, _, _ = socket.recv_fds(control, MAX_START, 1)
        if not body:
            return
        if os.fork() == 0:
            _monitor(msgspec.msgpack.decode(body, type=StartRequest), files[0], program)
        os.close(files[0])


def _import_program(name: str) -> "SandboxProgram | IsolationError":
    try:
        program = cast("SandboxProgram", importlib.import_module(name))
        program.prepare()
    except Exception as error:  # noqa: BLE001 - every sandbox reports it when it starts
        return IsolationError(f"{name}: {error!r}")
    return program


def _monitor(start: StartRequest, line: int, program: "SandboxProgram | IsolationError") -> NoReturn:
    """Forks the worker and waits until the client closes the socket or the worker exits."""
    folder: Path | None = None
    try:
        os.dup2(line, _LINE)
        os.closerange(_LINE + 1, _MAX_FILE)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with suppress(OSError, AttributeError):
            isolation.set_parent_death_signal()
        if isinstance(program, IsolationError):
            raise program
        if start.is_confined:
            enter_namespaces()
        else:
            folder = Path(tempfile.mkdtemp())
            folder.chmod(0o777)
        worker = os.fork()
        if worker == 0:
            _run_worker(start, folder, program)
        exited = _wait(worker)
        if exited is not None:
            os.write(_LINE, frame(exited))
    except IsolationError as missing:
        os.write(_LINE, frame(Ready(str(missing))))
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def _wait(worker: int) -> Exited | None:
    """Returns how the worker exited; `None`: the client closed the socket, and the worker was killed."""
    process = os.pidfd_open(worker)
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    waiting.register(_LINE, select.POLLRDHUP)
    ready = [file for file, _ in waiting.poll()]
    if process not in ready:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        return None
    _, status = os.waitpid(worker, 0)
    return Exited(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


def _run_worker(start: StartRequest, folder: Path | None, program: SandboxProgram) -> NoReturn:
    """Confines this process and serves requests until the socket closes."""
    try:
        folders = [Path(each) for each in start.folders]
        sys.path.extend(start.folders)
        needed = program.reads()
        if folder is None:
            confine(start.limits, folders, needed)
        else:
            limit_without_namespaces(start.limits, folder, needed)
        os.write(_LINE, frame(Ready()))
        program.serve(_LINE, start.limits)
    except IsolationError as missing:
        os.write(_LINE, frame(Ready(str(missing))))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
