"""The nursery: a process that makes sandboxes by forking itself, in milliseconds, because nothing is imported again.

Its first argument is the program of its sandboxes, see `rollwright.sandbox.client`. Its standard input is a socket;
each message there brings one end of another socket, for one sandbox. A sandbox is two processes: a warden, which waits,
and the worker behind the walls. The socket is its life line: when the other side hangs up, for whatever reason, the
warden ends; when a warden ends, its worker is killed with all that is in its namespaces; when the nursery ends, so do the
wardens. So nothing has to be kept track of, and nothing can be left over.
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
from rollwright.sandbox.isolation import WORK, Missing, enter_namespaces, lock_in, make_do, standard_library
from rollwright.sandbox.protocol import Ended, Ready, SandboxLimits, Start, frame
from rollwright.sandbox.seccomp import COMPUTING
from rollwright.sandbox.seccomp import program as filter_program

MAX_START = 1 << 16
"""Bytes of a `Start`."""

_LINE = 3
"""The number of a sandbox's socket; the only open file beside the three standard ones."""

_MAX_FILE = 4096
"""No file of the nursery has a higher number."""


class SandboxProgram(Protocol):
    """What a program's module has."""

    def prepare(self) -> None: ...

    def reads(self) -> list[Path]: ...

    def serve(self, line: int, limits: SandboxLimits) -> None: ...


def main() -> None:
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    os.close(nothing)
    os.umask(
        0o022
    )  # the folders on the way to what a sandbox may read are made anew, and it must get through them
    made = _prepared(sys.argv[1])
    filter_program(COMPUTING)  # kept for all sandboxes
    library = standard_library()
    sys.path[:] = map(str, (library, library / "lib-dynload"))
    os.environ.clear()
    os.environ["HOME"] = str(WORK)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then clears away wardens that have ended
    gc.collect()
    gc.freeze()  # a fork then copies only the memory it changes
    while True:
        body, files, _, _ = socket.recv_fds(control, MAX_START, 1)
        if not body:
            return
        if os.fork() == 0:
            _warden(msgspec.msgpack.decode(body, type=Start), files[0], made)
        os.close(files[0])


def _prepared(name: str) -> "SandboxProgram | Missing":
    try:
        program = cast("SandboxProgram", importlib.import_module(name))
        program.prepare()
    except Exception as error:  # noqa: BLE001 - whatever it is, each sandbox that is asked for says so
        return Missing(f"{name}: {error!r}")
    return program


def _warden(start: Start, line: int, program: "SandboxProgram | Missing") -> NoReturn:
    """Waits until the sandbox is not needed any more, or has ended by itself."""
    folder: Path | None = None
    try:
        os.dup2(line, _LINE)
        os.closerange(_LINE + 1, _MAX_FILE)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with suppress(OSError, AttributeError):
            isolation.die_with_parent()
        if isinstance(program, Missing):
            raise program
        if start.is_confined:
            enter_namespaces()
        else:
            folder = Path(tempfile.mkdtemp())
            folder.chmod(0o777)
        worker = os.fork()
        if worker == 0:
            _behind_walls(start, folder, program)
        ended = _wait(worker)
        if ended is not None:
            os.write(_LINE, frame(ended))
    except Missing as missing:
        os.write(_LINE, frame(Ready(str(missing))))
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def _wait(worker: int) -> Ended | None:
    """`None`: the other side has hung up, and the worker was killed."""
    process = os.pidfd_open(worker)
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    waiting.register(_LINE, select.POLLRDHUP)
    heard = [file for file, _ in waiting.poll()]
    if process not in heard:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        return None
    _, status = os.waitpid(worker, 0)
    return Ended(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


def _behind_walls(start: Start, folder: Path | None, program: SandboxProgram) -> NoReturn:
    """The worker's whole life."""
    try:
        folders = [Path(each) for each in start.folders]
        sys.path.extend(start.folders)
        needed = program.reads()
        if folder is None:
            lock_in(start.limits, folders, needed)
        else:
            make_do(start.limits, folder, needed)
        os.write(_LINE, frame(Ready()))
        program.serve(_LINE, start.limits)
    except Missing as missing:
        os.write(_LINE, frame(Ready(str(missing))))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
