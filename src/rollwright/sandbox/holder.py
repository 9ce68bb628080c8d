"""The holder: one small process per box, which builds the box, guards it, and removes it.

Started as a program, this module is a fork server: each message on its standard input carries the socket of one new holder. The
next holder waits for its message before it comes.
A holder ends its box when that socket is closed, which the kernel does when the client dies, when the lease is not renewed,
or when the box ends by itself. The box ends when its holder does, because bubblewrap dies with its parent and the kernel
kills a PID namespace with its first process. So there is no order in which processes can be killed that leaves a process or a
mount behind; folders and control groups that remain after a kill of the holder itself are removed by the reaper
(`rollwright.sandbox.leases`).

A box is a user namespace, an overlay mounted in a mount namespace of its own, and bubblewrap in it. Its first program is a
shell that waits; `rollwright.sandbox.inside` enters the same namespaces for every command.
"""

import gc
import itertools
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from rollwright.sandbox import cgroups, inside, namespaces
from rollwright.sandbox.isolation import (
    NEW_MOUNTS,
    NEW_USER,
)
from rollwright.sandbox.launcher import Launcher, LaunchError, prepare_layer
from rollwright.sandbox.leases import (
    BoxRecord,
    lease_end,
    now,
    read_record,
    remove_box,
    renew,
    start_time,
    write_record,
)
from rollwright.sandbox.messages import (
    BoxReady,
    CallDone,
    CallFailed,
    CopyRequest,
    GetRequest,
    HolderRequest,
    HoldRequest,
    ListenRequest,
    PutRequest,
    RenewRequest,
    RunRequest,
    receive,
    send,
)
from rollwright.sandbox.seccomp import BOX_RULES, compile_filter

_MAX_FILE = 4096
"""Upper bound of the descriptors that the fork server may have open."""

_TAKEN = b"t"
"""What the next holder tells the fork server when it has a box; when the box runs, it closes the pipe."""

_EXIT_MILLISECONDS = 2000


def main() -> None:
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    os.close(nothing)
    os.umask(0o022)
    compile_filter(BOX_RULES)  # cached, so that every fork has it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    waiting = select.poll()
    while True:
        taken, telling = os.pipe()
        if os.fork() == 0:
            _wait_for_box(control, telling)
        os.close(telling)
        has_taken = os.read(taken, 1) == _TAKEN
        if has_taken:
            # The next one is prepared when this box runs, so as not to take time from it, or when it is asked for.
            waiting.register(control, select.POLLIN)
            waiting.register(taken, select.POLLIN)
            waiting.poll()
            waiting.unregister(control)
            waiting.unregister(taken)
        os.close(taken)
        if not has_taken and _is_over(control):
            return  # holders see the end of their own sockets, and remove their boxes first


def _is_over(control: socket.socket) -> bool:
    """Whether there will be no more requests."""
    try:
        return not control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _wait_for_box(control: socket.socket, telling: int) -> NoReturn:
    """The next holder, forked before it is asked for, with the process that will be bubblewrap: a start waits for neither."""
    launcher = Launcher()
    with suppress(OSError):
        launcher.prepare()
    request, files = receive(control, HoldRequest)
    if request is None:
        os._exit(0)
    os.write(telling, _TAKEN)
    _hold(request, files[0], launcher, telling)


def _hold(request: HoldRequest, line_file: int, launcher: Launcher, telling: int) -> NoReturn:
    line = socket.socket(fileno=line_file)
    kept = sorted({2, line_file, telling, *launcher.files, _MAX_FILE})
    for low, high in itertools.pairwise(kept):
        os.closerange(low + 1, high)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pid = os.getpid()
    record = msgspec.structs.replace(request.record, holder=pid, holder_start=start_time(pid) or 0)
    folder = Path(request.folder)
    holder = Holder(request, record, folder, line, launcher)
    try:
        write_record(folder, record)
        holder.build()
        os.close(telling)
        holder.guard()
    except LaunchError as error:
        _reply(line, CallFailed(str(error)))
    except OSError as error:
        _reply(
            line, CallFailed(f"{error.strerror or error}: {error.filename or 'the box could not be built'}")
        )
    except SystemExit:
        pass
    finally:
        holder.end()
        os._exit(0)


class Holder:
    """One box, seen by its holder."""

    def __init__(
        self,
        request: HoldRequest,
        record: BoxRecord,
        folder: Path,
        line: socket.socket,
        launcher: Launcher,
    ) -> None:
        self._request = request
        self._launcher = launcher
        self._record = record
        self._folder = folder
        self._line = line
        self._groups: list[Path] = []
        self._missing: list[str] = []
        self._monitor = 0
        """Process id of bubblewrap outside the box; 0: there is none."""
        self._files: list[int] = []
        """Descriptors that are kept open for the life of the box."""
        self.init = 0

    def build(self) -> None:
        """Starts the box; for a container or a snapshot there is nothing to build."""
        request = self._request
        if request.lower:
            self._groups, self._missing = cgroups.create(
                self._record.id, memory=request.memory, processes=request.processes, cpus=request.cpus
            )
            self._start_bubblewrap()
        else:
            self._launcher.drop()
        _reply(self._line, BoxReady(self.init, tuple(self._missing)))

    def guard(self) -> None:
        """Serves requests until the client closes the socket, the lease ends, or the box does."""
        waiting = select.poll()
        waiting.register(self._line, select.POLLIN)
        if self._monitor:
            self._files.append(process := os.pidfd_open(self._monitor))
            waiting.register(process, select.POLLIN)
        while True:
            end = lease_end(self._folder)
            left = 0.0 if end is None else end - now()
            if left <= 0:
                return
            ready = {file for file, _ in waiting.poll(1000 * min(left, 3600.0) + 1)}
            if ready and self._line.fileno() not in ready:
                return  # the box has ended by itself
            if not ready:
                continue
            received: tuple[Any, list[int]] = receive(self._line, HolderRequest)  # type: ignore[arg-type]
            request, files = received
            if request is None:
                return
            self._serve(request, files)
            for each in files:
                os.close(each)

    def end(self) -> None:
        """Ends the box and removes all of it."""
        with suppress(OSError):
            cgroups.thaw(self._groups)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if self._monitor:
            self._kill()
        with suppress(Exception):
            remove_box(self._folder, read_record(self._folder) or self._record)

    def _kill(self) -> None:
        """Kills the first process of the box, with which all others die; bubblewrap outside then ends by itself."""
        with suppress(OSError):
            os.kill(self.init or self._monitor, signal.SIGKILL)
        with suppress(OSError):
            waiting = select.poll()
            waiting.register(os.pidfd_open(self._monitor), select.POLLIN)
            if not waiting.poll(_EXIT_MILLISECONDS):
                os.kill(self._monitor, signal.SIGKILL)
            os.waitpid(self._monitor, 0)

    def _serve(self, request: HolderRequest, files: list[int]) -> None:
        match request:
            case RenewRequest():
                renew(self._folder, self._record.label.lease_seconds)
            case RunRequest() | PutRequest() | GetRequest():
                call = inside.call_for(request, self._request.memory, self._request.processes, self._missing)
                self._fork(lambda: inside.run(self.init, self._groups, call, files), files)
            case ListenRequest():
                self._fork(lambda: inside.listen(request.process or self.init, request.port, files[0]), files)
            case CopyRequest():
                self._fork(lambda: self._copy(request, files[0]), files)

    def _fork(self, work: Callable[[], None], kept: list[int]) -> None:
        """Does `work` in a process of its own, which has no other files open."""
        if os.fork() != 0:
            return
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            kept_files = set(kept)
            for each in {self._line.fileno(), *self._files} - kept_files:
                os.close(each)
            work()
        except OSError as error:
            with suppress(OSError), socket.socket(fileno=kept[0]) as line:
                _reply(line, CallFailed(f"{error.strerror or error}"))
        finally:
            os._exit(0)

    def _copy(self, request: CopyRequest, line_file: int) -> None:
        """Copies the box's layer, while its processes stand still, from inside the namespaces that own its files."""
        with socket.socket(fileno=line_file) as line:
            cgroups.freeze(self._groups)
            try:
                copied = os.fork()
                if copied == 0:
                    namespaces.enter(self._monitor, NEW_USER | NEW_MOUNTS)
                    os.execvp("cp", ["cp", "-a", "--reflink=auto", str(self._layer / "upper"), request.into])
                _, status = os.waitpid(copied, 0)
            finally:
                cgroups.thaw(self._groups)
            code = os.waitstatus_to_exitcode(status)
            _reply(line, CallDone() if code == 0 else CallFailed("the files of the box could not be copied"))

    @property
    def _layer(self) -> Path:
        """Folder of the box's own layer; a mount in its namespace where its size is limited."""
        return self._folder / "layer"

    def _start_bubblewrap(self) -> None:
        for name in ("layer", "merged"):
            (self._folder / name).mkdir()
        if not self._request.disk:
            prepare_layer(self._layer, self._request)
        try:
            self.init, lifeline = self._launcher.launch(self._request, self._folder, self._groups)
        finally:
            self._monitor = self._launcher.pid
        self._files.append(lifeline)


def _reply(line: socket.socket, message: msgspec.Struct) -> None:
    with suppress(OSError):  # the client is gone
        send(line, message)


if __name__ == "__main__":
    main()
