"""The fork server: forks sandboxes in about a millisecond, because what they share is made once.

Its arguments name the program of its sandboxes (see `rollwright.sandbox.client`) and the folders that they may read. Its
standard input is a socket; each message there carries the file descriptor of another socket, for one new sandbox. Sandboxes
are forked by `rollwright.sandbox.spawner`, a child that has entered namespaces and has the root of the sandboxes; where the
machine refuses that, this process forks sandboxes with limits only, for clients that accept these.

Always true: no process outlives its client. When the client closes the sandbox's socket, the sandbox is killed. When the
client dies, the spawner exits; with it, the first process of their PID namespace, the kernel kills all its sandboxes.
"""

import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Protocol, cast

from rollwright.sandbox import isolation
from rollwright.sandbox.isolation import (
    WORK,
    IsolationError,
    enter_namespaces,
    limit_without_namespaces,
    standard_library,
)
from rollwright.sandbox.protocol import (
    Exited,
    Ready,
    SandboxLimits,
    StartRequest,
    address_space,
    frame,
    rlimits_of,
)
from rollwright.sandbox.seccomp import SANDBOX_RULES, compile_filter
from rollwright.sandbox.spawner import LINE, Spawner, keep_only_line, receive_start

_MAX_REASON = 4096
"""Bytes of the reason why no confined sandbox can be made."""


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
    folders = sys.argv[2:]
    compile_filter(SANDBOX_RULES)  # caches the filter, so that every fork inherits it
    library = standard_library()
    sys.path[:] = map(str, (library, library / "lib-dynload", *folders))
    os.environ.clear()
    os.environ["HOME"] = str(WORK)
    gc.collect()
    gc.freeze()  # the collector would otherwise write to, and so copy, pages that forks share
    if isinstance(program, IsolationError):
        _serve_limited(control, str(program), None)
    else:
        _serve_limited(control, _serve_confined(control, program, [Path(each) for each in folders]), program)


def _import_program(name: str) -> "SandboxProgram | IsolationError":
    try:
        program = cast("SandboxProgram", importlib.import_module(name))
        program.prepare()
    except Exception as error:  # noqa: BLE001 - every sandbox reports it when it starts
        return IsolationError(f"{name}: {error!r}")
    return program


def _serve_confined(control: socket.socket, program: SandboxProgram, folders: list[Path]) -> str:
    """Serves confined sandboxes until the client closes the socket, and exits then; returns why there can be none.

    Namespaces cannot be left again, so a child tries first whether this machine allows all of it."""
    reasons, report = os.pipe()
    trial = os.fork()
    if trial == 0:
        _enter_and_fork(lambda: Spawner(control, program).prepare(folders), report)
    os.close(report)
    missing = os.read(reasons, _MAX_REASON)  # ends without a byte when all went well
    os.close(reasons)
    os.waitpid(trial, 0)
    if not missing:
        _enter_and_fork(lambda: Spawner(control, program).run(folders), os.open(os.devnull, os.O_WRONLY))
    return missing.decode()


def _enter_and_fork(work: Callable[[], None], report: int) -> NoReturn:
    """Enters namespaces, has their first process do the work, and exits after it. What is missing is reported."""
    try:
        with suppress(OSError, AttributeError):
            isolation.set_parent_death_signal()
        enter_namespaces()
        first = os.fork()
        if first == 0:
            work()
            os._exit(0)
        os.waitpid(first, 0)
    except IsolationError as missing:
        os.write(report, str(missing).encode()[:_MAX_REASON])
    finally:
        os._exit(0)


def _serve_limited(control: socket.socket, missing: str, program: SandboxProgram | None) -> None:
    """Refuses confined sandboxes because of what is missing, and forks those for which limits suffice."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps monitors that exited
    while True:
        start, line = receive_start(control)
        if start is None:
            return
        if start.is_confined or program is None:
            with suppress(OSError):
                os.write(line, frame(Ready(missing)))
        elif os.fork() == 0:
            _monitor(start, line, program)
        os.close(line)


def _monitor(start: StartRequest, line: int, program: SandboxProgram) -> NoReturn:
    """Forks the worker and waits until the client closes the socket or the worker exits."""
    import shutil  # here, because every sandbox would have their libraries mapped
    import tempfile

    folder: Path | None = None
    try:
        keep_only_line(line)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with suppress(OSError, AttributeError):
            isolation.set_parent_death_signal()
        folder = Path(tempfile.mkdtemp())
        folder.chmod(0o777)
        worker = os.fork()
        if worker == 0:
            _run_limited(start, folder, program)
        exited = _wait(worker)
        if exited is not None:
            os.write(LINE, frame(exited))
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def _wait(worker: int) -> Exited | None:
    """Returns how the worker exited; `None`: the client closed the socket, and the worker was killed."""
    process = os.pidfd_open(worker)
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    waiting.register(LINE, select.POLLRDHUP)
    ready = [file for file, _ in waiting.poll()]
    if process not in ready:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        return None
    _, status = os.waitpid(worker, 0)
    return Exited(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


def _run_limited(start: StartRequest, folder: Path, program: SandboxProgram) -> NoReturn:
    """Limits this process and serves requests until the socket closes."""
    try:
        rlimits = rlimits_of(start.limits, address_space())
        limit_without_namespaces(list(map(str, program.reads())), rlimits, folder)
        os.write(LINE, frame(Ready()))
        program.serve(LINE, start.limits)
    except IsolationError as missing:
        os.write(LINE, frame(Ready(str(missing))))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
