"""The process that becomes bubblewrap: its namespaces are made before a box is asked for, its mounts when it is.

A user namespace and a mount namespace of its own do not depend on the box, and giving user ids to one takes a round trip between
two processes; so `prepare` does that ahead. `launch` sends the box's description: the process enters the control
groups, mounts the overlay, and executes bubblewrap. A prepared process ends when its holder does.
"""

import os
import select
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from rollwright.sandbox import cgroups, namespaces
from rollwright.sandbox.isolation import (
    NEW_MOUNTS,
    NEW_NETWORK,
    NEW_USER,
    make_mounts_private,
    set_parent_death_signal,
    unshare,
)
from rollwright.sandbox.messages import HoldRequest

_BUILD_SECONDS = 30.0
_WAIT_PROGRAM = ("/bin/sh", "-c", "echo ready; read _")
"""First program of a box: it needs nothing but a shell, and ends when its holder does."""

_MASKED = ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/kmsg", "/proc/sysrq-trigger")
_READ_ONLY = ("/proc/sys", "/proc/fs", "/proc/irq", "/proc/bus")
"""Files of the kernel whose owner may write to them; root in a box is their owner where the box was started by root."""


class LaunchError(Exception):
    """The box cannot be built; the message is one line."""


class _Order(msgspec.Struct, frozen=True):
    """What the prepared process is to become."""

    request: HoldRequest
    folder: str
    groups: tuple[str, ...]


class Launcher:
    """Starts one bubblewrap."""

    def __init__(self) -> None:
        self.pid = 0
        """Of the process that becomes bubblewrap; 0: there is none."""
        self._ends: dict[str, int] = {}
        """This process's ends of the pipes between both."""

    @property
    def files(self) -> tuple[int, ...]:
        return tuple(self._ends.values())

    def prepare(self, network_of: int = 0) -> None:
        """Forks the process and makes its namespaces. `network_of`: process whose network it shares."""
        theirs: dict[str, int] = {}
        for name in ("unshared", "info", "output", "errors"):
            self._ends[name], theirs[name] = os.pipe()
        for name in ("mapped", "order", "lifeline"):
            theirs[name], self._ends[name] = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for each in self.files:
                os.close(each)
            _become_bubblewrap(theirs, network_of)
        for each in theirs.values():
            os.close(each)
        if os.read(self._ends["unshared"], 1):
            _map_ids(self.pid)
            os.write(self._ends["mapped"], b"x")

    def launch(self, request: HoldRequest, folder: Path, groups: list[Path]) -> tuple[int, int]:
        """Starts the box: its first process, and the file that keeps it alive."""
        if request.network_of or not self.pid:
            self.drop()
            self.prepare(request.network_of)
        order = msgspec.msgpack.encode(_Order(request, str(folder), tuple(map(str, groups))))
        try:
            with open(self._ends.pop("order"), "wb") as sending, suppress(BrokenPipeError):
                sending.write(order)
            if _read_with_limit(self._ends["output"]) != b"ready":
                raise LaunchError(_explain(self._ends["errors"]))
            init = int(msgspec.json.decode(os.read(self._ends["info"], 4096))["child-pid"])
            return init, self._ends.pop("lifeline")
        finally:
            self._close()

    def drop(self) -> None:
        """Ends a prepared process that is not needed."""
        self._close()
        self.pid = 0

    def _close(self) -> None:
        for each in self._ends.values():
            os.close(each)
        self._ends.clear()


def _become_bubblewrap(pipes: dict[str, int], network_of: int) -> NoReturn:
    try:
        os.dup2(pipes["errors"], 2)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        if network_of:
            namespaces.enter(network_of, NEW_NETWORK)
        unshare(NEW_USER | NEW_MOUNTS)
        os.write(pipes["unshared"], b"x")
        if not os.read(pipes["mapped"], 1):
            os._exit(1)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        set_parent_death_signal()
        make_mounts_private()
        with open(pipes["order"], "rb") as reading:
            content = reading.read()
        if not content:
            os._exit(0)
        _execute(msgspec.msgpack.decode(content, type=_Order), pipes)
    except OSError as error:
        os.write(2, f"{error.filename or ''} {error.strerror or error}".strip().encode())
    finally:
        os._exit(1)


def _execute(order: _Order, pipes: dict[str, int]) -> NoReturn:
    request, folder = order.request, Path(order.folder)
    cgroups.enter(cgroups.open_entries([Path(each) for each in order.groups]))
    layer = folder / "layer"
    if request.disk:
        namespaces.mount_tmpfs(str(layer), request.disk)
        prepare_layer(layer, request)
    os.chdir(folder)  # relative names are short: the kernel takes one page of options
    namespaces.mount_overlay("merged", list(request.lower), "layer/upper", "layer/work")
    os.dup2(pipes["lifeline"], 0)
    os.dup2(pipes["output"], 1)
    os.set_inheritable(pipes["info"], True)
    os.execvp("bwrap", _arguments(request, folder, pipes["info"]))


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


def prepare_layer(layer: Path, request: HoldRequest) -> None:
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
