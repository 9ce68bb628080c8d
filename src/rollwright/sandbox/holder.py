"""The holder: one small process per box, which builds the box, guards it, and removes it.

Started as a program, this module is a fork server: each message on its standard input carries the socket of one new holder.
A holder ends its box when that socket is closed, which the kernel does when the client dies, when the lease is not renewed,
or when the box ends by itself. The box ends when its holder does, because bubblewrap dies with its parent and the kernel
kills a PID namespace with its first process. So there is no order in which processes can be killed that leaves a process or a
mount behind; folders and control groups that remain after a kill of the holder itself are removed by the reaper
(`rollwright.sandbox.leases`).

A box is a user namespace, an overlay mounted in a mount namespace of its own, and bubblewrap in it. Its first program is a
shell that waits; `rollwright.sandbox.inside` enters the same namespaces for every command.
"""

import gc
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from rollwright.sandbox import cgroups, inside, namespaces
from rollwright.sandbox.isolation import (
    NEW_MOUNTS,
    NEW_NETWORK,
    NEW_USER,
    make_mounts_private,
    set_parent_death_signal,
    unshare,
)
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

_BUILD_SECONDS = 30.0
_EXIT_MILLISECONDS = 2000
_WAIT_PROGRAM = ("/bin/sh", "-c", "echo ready; read _")
"""First program of a box: it needs nothing but a shell, and ends when its holder does."""

_MASKED = ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/kmsg", "/proc/sysrq-trigger")
_READ_ONLY = ("/proc/sys", "/proc/fs", "/proc/irq", "/proc/bus")
"""Files of the kernel whose owner may write to them; root in a box is their owner where the box was started by root."""


class _Abandoned(Exception):
    """The box cannot be built; the message is one line."""


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
    while True:
        request, files = receive(control, HoldRequest)
        if request is None:
            return  # holders see the end of their own sockets, and remove their boxes first
        if os.fork() == 0:
            _hold(request, files[0])
        for each in files:
            os.close(each)


def _hold(request: HoldRequest, line_file: int) -> NoReturn:
    line = socket.socket(fileno=line_file)
    for low, high in ((3, line_file), (line_file + 1, _MAX_FILE)):
        os.closerange(low, high)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pid = os.getpid()
    record = msgspec.structs.replace(request.record, holder=pid, holder_start=start_time(pid) or 0)
    folder = Path(request.folder)
    holder = Holder(request, record, folder, line)
    try:
        write_record(folder, record)
        holder.build()
        holder.guard()
    except _Abandoned as error:
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

    def __init__(self, request: HoldRequest, record: BoxRecord, folder: Path, line: socket.socket) -> None:
        self._request = request
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
        """Forks the process that becomes bubblewrap, and gives it its user ids from outside."""
        request, folder = self._request, self._folder
        for name in ("layer", "merged"):
            (folder / name).mkdir()
        if not request.disk:
            _prepare_layer(self._layer, request)
        pipes = {name: os.pipe() for name in ("unshared", "mapped", "info", "lifeline", "output", "errors")}
        pid = os.fork()
        if pid == 0:
            _become_bubblewrap(request, folder, self._groups, pipes)
        self._monitor = pid
        for name, used in (
            ("unshared", 1),
            ("mapped", 0),
            ("info", 1),
            ("lifeline", 0),
            ("output", 1),
            ("errors", 1),
        ):
            os.close(pipes[name][used])
        try:
            if os.read(pipes["unshared"][0], 1):
                _map_ids(pid)
                os.write(pipes["mapped"][1], b"x")
            output = _read_with_limit(pipes["output"][0])
            if output != b"ready":
                raise _Abandoned(_explain(pipes["errors"][0]))
            self.init = int(msgspec.json.decode(os.read(pipes["info"][0], 4096))["child-pid"])
        finally:
            for name, end in (("unshared", 0), ("mapped", 1), ("info", 0), ("output", 0), ("errors", 0)):
                os.close(pipes[name][end])
        self._files.append(pipes["lifeline"][1])


def _become_bubblewrap(
    request: HoldRequest, folder: Path, groups: list[Path], pipes: dict[str, tuple[int, int]]
) -> NoReturn:
    try:
        os.dup2(pipes["errors"][1], 2)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        cgroups.enter(groups)
        if request.network_of:
            namespaces.enter(request.network_of, NEW_NETWORK)
        unshare(NEW_USER | NEW_MOUNTS)
        os.write(pipes["unshared"][1], b"x")
        if not os.read(pipes["mapped"][0], 1):
            os._exit(1)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        set_parent_death_signal()
        make_mounts_private()
        layer = folder / "layer"
        if request.disk:
            namespaces.mount_tmpfs(str(layer), request.disk)
            _prepare_layer(layer, request)
        os.chdir(folder)  # relative names are short: the kernel takes one page of options
        namespaces.mount_overlay("merged", list(request.lower), "layer/upper", "layer/work")
        os.dup2(pipes["lifeline"][0], 0)
        os.dup2(pipes["output"][1], 1)
        os.set_inheritable(pipes["info"][1], True)
        os.execvp("bwrap", _arguments(request, folder, pipes["info"][1]))
    except OSError as error:
        os.write(2, f"{error.filename or ''} {error.strerror or error}".strip().encode())
    finally:
        os._exit(1)


def _arguments(request: HoldRequest, folder: Path, info: int) -> list[str]:
    words = ["bwrap", "--bind", str(folder / "merged"), "/", "--dev", "/dev", "--proc", "/proc"]
    for each in _READ_ONLY:
        if os.path.isdir(each):
            words += ["--ro-bind", each, each]
    for each in _MASKED:
        if os.path.exists(each):
            words += ["--ro-bind", "/dev/null", each]
    for mounted in request.mounts:
        words += ["--ro-bind" if mounted.read_only else "--bind", mounted.source, mounted.path]
    words += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += [] if request.network_of else ["--unshare-net"]
    words += ["--hostname", request.hostname, "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    words += ["--clearenv", "--setenv", "PATH", "/usr/bin:/bin", "--chdir", "/", "--info-fd", str(info)]
    return [*words, "--", *_WAIT_PROGRAM]


def _prepare_layer(layer: Path, request: HoldRequest) -> None:
    """The box's own layer: that of another box, or an empty one in which the box's name can be looked up."""
    (layer / "work").mkdir()
    upper = layer / "upper"
    if request.upper:
        try:
            os.rename(request.upper, upper)
        except OSError:  # another file system
            subprocess.run(["cp", "-a", request.upper, str(upper)], check=True, capture_output=True)
            shutil.rmtree(request.upper, ignore_errors=True)
        return
    (upper / "etc").mkdir(parents=True)
    names = " ".join(dict.fromkeys(("localhost", request.hostname, *request.hosts)))
    (upper / "etc" / "hosts").write_text(f"127.0.0.1 {names}\n::1 localhost\n")


def _map_ids(pid: int) -> None:
    """Gives a user namespace its ids: all of the usual ones for root, those of /etc/subuid for others, else one."""
    user, group = os.getuid(), os.getgid()
    if user == 0:
        Path(f"/proc/{pid}/uid_map").write_text("0 0 65536")
        Path(f"/proc/{pid}/gid_map").write_text("0 0 65536")
        return
    ranges = [_subordinate(file) for file in ("/etc/subuid", "/etc/subgid")]
    if all(ranges) and shutil.which("newuidmap") and shutil.which("newgidmap"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        mapped = [
            subprocess.run(
                [tool, str(pid), "0", str(own), "1", "1", *map(str, further)], capture_output=True
            ).returncode
            for tool, own, further in (("newuidmap", user, ranges[0]), ("newgidmap", group, ranges[1]))
        ]
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        if mapped == [0, 0]:
            return
    Path(f"/proc/{pid}/setgroups").write_text("deny")
    Path(f"/proc/{pid}/uid_map").write_text(f"0 {user} 1")
    Path(f"/proc/{pid}/gid_map").write_text(f"0 {group} 1")


def _subordinate(file: str) -> tuple[int, int]:
    """First id and number of ids that this user may use beside its own; empty: none."""
    import pwd

    names = {str(os.getuid()), pwd.getpwuid(os.getuid()).pw_name}
    with suppress(OSError, ValueError):
        for line in Path(file).read_text().splitlines():
            name, first, count = line.split(":")
            if name in names:
                return int(first), min(int(count), 65535)
    return ()  # type: ignore[return-value]


def _read_with_limit(file: int) -> bytes:
    """The first line, without its end; empty if there is none in time."""
    deadline = time.monotonic() + _BUILD_SECONDS
    read = b""
    while not read.endswith(b"\n"):
        ready, _, _ = select.select([file], [], [], max(0.0, deadline - time.monotonic()))
        more = os.read(file, 64) if ready else b""
        if not more:
            return b""
        read += more
    return read.rstrip()


def _explain(errors: int) -> str:
    os.set_blocking(errors, False)
    try:
        text = os.read(errors, 4096).decode(errors="replace").strip()
    except BlockingIOError:
        text = ""
    return (
        f"bubblewrap: {text.splitlines()[-1].removeprefix('bwrap: ')}"
        if text
        else "the box did not start in time"
    )


def _reply(line: socket.socket, message: msgspec.Struct) -> None:
    with suppress(OSError):  # the client is gone
        send(line, message)


if __name__ == "__main__":
    main()
