"""Work inside a box: a process of the holder that enters its namespaces, gives up its rights, and runs one call.

Always true: the process that runs the call belongs to the box's control groups and PID namespace, has the capabilities of
`BOX_CAPABILITIES` at most and only in the box's user namespace, the system-call filter of boxes, and no open file but those
of the call. Another process waits for it outside, reports how it ended, and kills its session when the client closes the
call's socket.
"""

import os
import resource
import select
import signal
import socket
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rollwright.sandbox import cgroups, namespaces
from rollwright.sandbox.box import DEFAULT_PATH
from rollwright.sandbox.isolation import NEW_NETWORK, NEW_USER, install_seccomp_filter
from rollwright.sandbox.messages import CallDone, CallFailed, GetRequest, PutRequest, RunRequest, send
from rollwright.sandbox.seccomp import BOX_RULES, compile_filter

Call = Callable[[list[int]], None]
"""What is done with the files of a call; it ends the process, or returns when it is done."""

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
"""Exit codes of a shell for a program that does not exist, and one that cannot be executed."""

_BACKLOG = 128
_KEPT = sum(1 << number for number in namespaces.BOX_CAPABILITIES.values())


def call_for(
    request: RunRequest | PutRequest | GetRequest, memory: int, processes: int, missing: list[str]
) -> Call:
    """The work of a request. `missing`: limits that no control group sets, and that hold for each process instead."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if "memory" in missing:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        if "pids" in missing:
            resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))

    def work(files: list[int]) -> None:
        limit()
        match request:
            case RunRequest():
                _execute(request, files)
            case PutRequest():
                _drop_rights(namespaces.find_user("0"))
                _unpack(request.path, files[1])
            case GetRequest():
                _drop_rights(namespaces.find_user("0"))
                _pack(request.path, files[1])

    return work


def run(init: int, groups: list[Path], call: Call, files: list[int]) -> None:
    """Runs a call in the box whose first process is `init`, and reports on `files[0]`, the call's socket."""
    line = socket.socket(fileno=files[0])
    entries = cgroups.open_entries(groups)
    namespaces.enter(init, namespaces.WHOLE_BOX)
    worker = os.fork()
    if worker == 0:
        _work(call, files, line, entries)
    for each in (*entries, *files[1:]):
        os.close(each)
    process = os.pidfd_open(worker)
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    waiting.register(line, select.POLLRDHUP)
    while process not in {file for file, _ in waiting.poll()}:
        _kill_session(worker)  # the client has given the call up
        waiting.unregister(line)
    _, status = os.waitpid(worker, 0)
    code = os.waitstatus_to_exitcode(status)
    _kill_late(line, worker)
    with suppress(OSError):
        send(line, CallDone(code if code >= 0 else 128 - code))


def _kill_late(line: socket.socket, worker: int) -> None:
    """Kills what a command that was given up has left in its session."""
    waiting = select.poll()
    waiting.register(line, select.POLLRDHUP)
    if waiting.poll(0):
        _kill_session(worker)


def _kill_session(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _work(call: Call, files: list[int], line: socket.socket, entries: list[int]) -> None:
    try:
        cgroups.enter(entries)
        os.setsid()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        call(files)
        os._exit(0)
    except (OSError, LookupError, tarfile.TarError) as error:
        told = (
            f"{error.filename}: {error.strerror}"
            if isinstance(error, OSError) and error.filename
            else str(error)
        )
        with suppress(OSError):
            send(line, CallFailed(told))
    finally:
        os._exit(1)


def listen(init: int, port: int, line_file: int) -> None:
    """Opens a listening socket on the box's loopback, and sends it out of the box."""
    is_same_user = os.readlink(f"/proc/{init}/ns/user") == os.readlink("/proc/self/ns/user")
    namespaces.enter(init, NEW_NETWORK if is_same_user else NEW_USER | NEW_NETWORK)
    with socket.socket(fileno=line_file) as line, socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(_BACKLOG)
        send(line, CallDone(), (listening.fileno(),))


def _drop_rights(user: namespaces.BoxUser) -> None:
    namespaces.forbid_new_rights()
    namespaces.keep_capabilities(_KEPT)
    if (program := compile_filter(BOX_RULES)) is not None:
        install_seccomp_filter(program)
    with suppress(PermissionError):  # a user namespace with one id only has no groups to set
        os.setgroups(user.groups)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)


def _execute(request: RunRequest, files: list[int]) -> None:
    user = namespaces.find_user(request.user)
    _drop_rights(user)
    os.umask(0o022)
    os.chdir(request.workdir or "/")
    # The call's socket stays with the process outside; a program gets the three standard files only.
    for number, file in enumerate(files[1:4]):
        os.dup2(file, number)
    os.closerange(3, max(files) + 1)
    environment = {"PATH": DEFAULT_PATH, "HOME": user.home, "USER": user.name, "LANG": "C.UTF-8"}
    environment |= request.environment
    words = list(request.command)
    if words[0] == "":
        with suppress(FileNotFoundError):
            os.execvpe("bash", ["bash", "-c", *words[1:]], environment)
        words = ["sh", "-c", *words[1:]]
    try:
        os.execvpe(words[0], words, environment)
    except (FileNotFoundError, NotADirectoryError):
        os.write(2, f"{words[0]}: command not found\n".encode())
        os._exit(_NOT_FOUND)
    except OSError as error:
        os.write(2, f"{words[0]}: {error.strerror}\n".encode())
        os._exit(_NOT_EXECUTABLE)


def _unpack(path: str, file: int) -> None:
    os.umask(0)
    os.makedirs(path, exist_ok=True)
    with os.fdopen(file, "rb") as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        # The archive comes from outside, and what it names can only be in the box.
        trusted = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
        archive.extractall(path, **trusted)  # type: ignore[arg-type]
        while stream.read(1 << 16):
            pass  # the sender must not see a closed pipe


def _pack(path: str, file: int) -> None:
    os.stat(path)
    with os.fdopen(file, "wb") as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        archive.add(path, arcname="." if os.path.isdir(path) else os.path.basename(path))
