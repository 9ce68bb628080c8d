"""Namespace, seccomp and rlimit setup for the sandbox's child process.

A confined process has no network, no other process, no files but its own tmpfs and the Python library (read-only), no
capabilities, an unprivileged user, and only the system calls that `rollwright.sandbox.seccomp` allows. What is the same for
all sandboxes of a fork server is set up once (`enter_namespaces`, `build_root`), the rest in each sandbox (`confine`); a step
that the machine refuses raises `IsolationError` with one line.

The first half of the module wraps the Linux calls for which Python has no function; each raises `OSError` when the kernel
refuses.
"""

import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from rollwright.sandbox.protocol import Rlimits
from rollwright.sandbox.seccomp import SANDBOX_RULES, compile_filter

NOBODY = 65534
"""User and group id of `nobody` on Linux."""

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = (
    0x0002_0000,
    0x0800_0000,
    0x1000_0000,
    0x2000_0000,
    0x4000_0000,
)
"""Namespace flags of `unshare`."""

_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 3, 22, 38
_SECCOMP_MODE_FILTER = 2
_SIGKILL = 9

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_NOATIME, _MS_NODIRATIME, _MS_BIND, _MS_REC, _MS_PRIVATE, _MS_RELATIME = (
    1 << 10,
    1 << 11,
    1 << 12,
    1 << 14,
    1 << 18,
    1 << 21,
)
_ST_RELATIME = 1 << 12
"""The only flag whose number in `statvfs` differs from the one in `mount`."""
_MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MIN_INODES, _BYTES_PER_INODE = 1024, 1 << 14
"""Inode limit of a tmpfs, at least and by size: each file costs the kernel about 1 kB beside its content."""
_CAPABILITY_VERSION = 0x2008_0522
_AF_UNIX, _SOCK_STREAM = 1, 1


def check_result(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


@cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:4]]
    if libc().prctl(option, *padded) < 0:
        check_result(-1, f"prctl {option}")


def set_parent_death_signal() -> None:
    """Has the kernel kill this process when its parent exits; a change of user resets this."""
    prctl(_PR_SET_PDEATHSIG, _SIGKILL)


class SeccompFilter:
    """A compiled filter in memory, ready to be installed."""

    def __init__(self, program: bytes) -> None:
        self._code = ctypes.create_string_buffer(program, len(program))
        # struct sock_fprog: the number of instructions, then their address
        header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(self._code))
        self._header = ctypes.create_string_buffer(header)

    def install(self) -> None:
        """Restricts this process and its children to the system calls that the filter allows; irreversible."""
        prctl(_PR_SET_NO_NEW_PRIVS, 1)  # the kernel demands it of a process without CAP_SYS_ADMIN
        prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(self._header))


def install_seccomp_filter(program: bytes) -> None:
    """Installs the filter of these instructions."""
    SeccompFilter(program).install()


def fork_quietly() -> int:
    """Forks this process, which must have one thread only, without Python's work after a fork. That makes locks anew that
    other threads may hold, and calls what modules registered: `random` would draw a new seed, for example."""
    pid = _fork_function()()
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"fork: {os.strerror(number)}")
    return int(pid)


@cache
def _fork_function() -> Callable[[], int]:
    function: Callable[[], int] = ctypes.PyDLL(None, use_errno=True).fork
    return function


def unshare(spaces: int) -> None:
    check_result(libc().unshare(ctypes.c_int(spaces)), "unshare")


def set_namespace(file: int, space: int) -> None:
    """Enters the namespace of an open file; a PID namespace is that of later children only."""
    check_result(libc().setns(ctypes.c_int(file), ctypes.c_int(space)), "setns")


def map_own_ids(user: int, group: int, proc: int | None = None) -> None:
    """Maps this user and group to themselves in a new user namespace, and no other ids. `proc`: descriptor of `/proc`, for a
    process whose root has none."""
    maps = (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"))
    for name, text in maps:
        path = f"/proc/self/{name}" if proc is None else f"self/{name}"
        file = os.open(path, os.O_WRONLY, dir_fd=proc)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


_CAPABILITY_HEADER = struct.pack("Ii", _CAPABILITY_VERSION, 0)
_NO_CAPABILITIES = bytes(24)


def drop_capabilities() -> None:
    check_result(libc().capset(_CAPABILITY_HEADER, _NO_CAPABILITIES), "capset")


def look_up_calls() -> None:
    """Finds the library functions that `confine` calls, once for all children of this process."""
    for name in ("prctl", "capset", "unshare", "socket", "fork"):
        getattr(libc(), name)
    prctl(_PR_GET_DUMPABLE)
    libc().socket(-1, 0, 0)


def make_mounts_private() -> None:
    """Keeps later mounts from propagating to other mount namespaces."""
    mount(None, "/", None, _MS_REC | _MS_PRIVATE, None)


def mount_tmpfs(at: Path, size: int, mode: int) -> None:
    """Mounts a tmpfs of `size` bytes; its inode limit is in proportion, because empty files take memory too."""
    inodes = max(_MIN_INODES, size // _BYTES_PER_INODE)
    options = f"size={size},nr_inodes={inodes},mode={mode:o}"
    mount("tmpfs", str(at), "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def make_read_only(at: Path) -> None:
    mount(None, str(at), None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV, None)


def bind_read_only(source: Path, at: Path) -> None:
    """Bind-mounts `source` at `at`, read-only."""
    mount(str(source), str(at), None, _MS_BIND | _MS_REC, None)
    # A bind mount takes MS_RDONLY only in a remount, and an unprivileged user may not clear flags in a remount.
    had = os.statvfs(source).f_flag
    kept = had & (_MS_NOEXEC | _MS_NOATIME | _MS_NODIRATIME)
    kept |= _MS_RELATIME if had & _ST_RELATIME else 0
    flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | kept
    mount(None, str(at), None, flags, None)


def pivot_root(folder: Path) -> None:
    """Makes `folder`, which must be a mount point, the root and detaches the old root."""
    os.chdir(folder)
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(f"pivot_root: its system-call number on {platform.machine()} is unknown")
    # Old and new root in one place: the old one is stacked on top, and detached without a directory of its own.
    check_result(libc().syscall(number, b".", b"."), "pivot_root")
    check_result(libc().umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")


def mount(source: str | None, at: str, kind: str | None, flags: int, options: str | None) -> None:
    texts = [None if each is None else os.fsencode(each) for each in (source, at, kind, options)]
    result = libc().mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    check_result(result, f"mount {at}")


_ROOT = Path("/proc")
"""Mount point of the sandbox's root while it is built: it exists everywhere and is not bind-mounted itself."""

WORK = Path("/tmp")
"""Working directory of the sandbox, the only writable one."""

_HIDDEN = Path("/.folders")
"""Where folders inside `WORK` are mounted for all sandboxes, each of which mounts a tmpfs over `WORK`."""

_LIBRARIES = tuple(map(Path, ("/lib", "/lib64", "/usr/lib", "/usr/lib64")))
"""Directories of the shared libraries that standard-library modules link to."""

_ROOT_SIZE = 1 << 20
"""Bytes; the root holds empty mount points only."""


class IsolationError(Exception):
    """The machine lacks an isolation feature; the message names it."""


def standard_library() -> Path:
    """Directory of the standard library; a virtual environment uses that of its base interpreter."""
    return Path(os.__file__).resolve().parent


def enter_namespaces() -> None:
    """Creates network, PID, mount and IPC namespaces for the children of this process, and a user namespace unless it is
    root. Root enters its user namespace at the end of `confine`: until then it must read files that only root can."""
    spaces = NEW_NETWORK | NEW_PIDS | NEW_MOUNTS | NEW_IPC
    user, group = os.geteuid(), os.getegid()
    _require("namespaces", lambda: unshare(spaces if user == 0 else spaces | NEW_USER))
    if user != 0:
        _require("a user namespace", lambda: map_own_ids(user, group))


HiddenFolders = Sequence[tuple[str, str]]
"""Places of folders inside `WORK` while no tmpfs is there, and where each sandbox has them."""


def build_root(folders: Sequence[Path]) -> HiddenFolders:
    """Replaces the root of this process's mount namespace by that of its sandboxes, which has no writable folder yet."""
    readable = _outermost([*_LIBRARIES, standard_library(), *folders])
    hidden = [each for each in readable if WORK in each.parents]
    places = {each: _HIDDEN / str(number) for number, each in enumerate(hidden)}
    _require("an own root folder", lambda: _change_root({each: places.get(each, each) for each in readable}))
    return [(str(place), str(each)) for each, place in places.items()]


def mount_own_folder(disk: int, hidden: HiddenFolders) -> None:
    """Enters a new mount namespace and mounts a tmpfs of `disk` bytes there, which no other sandbox sees."""
    unshare(NEW_MOUNTS)
    mount_tmpfs(WORK, disk, 0o777)
    for source, at in hidden:
        os.makedirs(at, exist_ok=True)
        mount(source, at, None, _MS_BIND | _MS_REC, None)  # read-only like its source


def confine(needed: Sequence[str], rlimits: Rlimits, filter_code: SeccompFilter, proc: int) -> None:
    """Confines this process, irreversibly. It must be the first process of its PID namespace, in a root of `build_root` with a
    folder of its own, and must afterwards be able to read the files `needed`. `proc`: descriptor of `/proc`, which the root
    does not have. It calls little, because each page of memory that a new process writes to is copied."""
    feature = "an own folder"
    try:
        os.chdir(WORK)
        user, group = os.geteuid(), os.getegid()
        if user == 0:
            feature = "an unprivileged user"
            become_nobody()
        feature = "a user namespace"
        unshare(NEW_USER)
        if user != 0:
            map_own_ids(user, group, proc)
        os.close(proc)
        _check_readable(needed)
        feature = "a parent-death signal"
        set_parent_death_signal()  # after the change of user, which resets it
        feature = "dropping capabilities"
        drop_capabilities()
        feature = "limits"
        for kind, values in rlimits:
            resource.setrlimit(kind, values)
        feature = "a system-call filter"
        filter_code.install()  # last, because the filter forbids most of the calls above
    except OSError as error:
        raise IsolationError(f"{feature}: {error.strerror or error}") from error
    _verify_filter()


def limit_without_namespaces(needed: Sequence[str], rlimits: Rlimits, folder: Path) -> None:
    """Applies rlimits and, where the machine has one, the seccomp filter; root becomes `nobody`, so no code runs as
    root."""
    os.chdir(folder)
    if os.geteuid() == 0:
        _require("an unprivileged user", become_nobody)
    _check_readable(needed)
    for kind, values in rlimits:
        resource.setrlimit(kind, values)
    if sys.platform == "linux" and (filter_code := compile_filter(SANDBOX_RULES)) is not None:
        with suppress(OSError):
            set_parent_death_signal()
            install_seccomp_filter(filter_code)


def _check_readable(needed: Sequence[str]) -> None:
    for file in needed:
        try:
            os.close(os.open(file, os.O_RDONLY))
        except OSError as error:
            raise IsolationError(
                f"the right of an unprivileged user to read {file} ({error.strerror}); let others read that "
                f"folder (chmod -R o+rX), or start as a user other than root"
            ) from error


def _require(feature: str, step: Callable[[], None]) -> None:
    try:
        step()
    except OSError as error:
        raise IsolationError(f"{feature}: {error.strerror or error}") from error


def _change_root(readable: Mapping[Path, Path]) -> None:
    """Replaces the root by a read-only tmpfs with the readable directories bind-mounted at their places, and a mount point for
    `WORK`."""
    make_mounts_private()
    mount_tmpfs(_ROOT, _ROOT_SIZE, 0o755)
    (_ROOT / WORK.relative_to("/")).mkdir()
    for source, place in readable.items():
        inside = _ROOT / place.relative_to("/")
        inside.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            inside.symlink_to(source.readlink())  # /lib is a link to usr/lib on merged-usr systems
        else:
            inside.mkdir(exist_ok=True)
            bind_read_only(source, inside)
    make_read_only(_ROOT)
    pivot_root(_ROOT)


def _outermost(places: Sequence[Path]) -> list[Path]:
    """The existing directories of `places` that are inside no other of them."""
    found = [each for each in dict.fromkeys(places) if each.is_dir()]
    return [each for each in found if not set(each.parents) & set(found)]


def _verify_filter() -> None:
    """Attempts two forbidden calls, to prove that the filter is active."""
    if (made := libc().socket(_AF_UNIX, _SOCK_STREAM, 0)) >= 0:
        os.close(made)
        raise IsolationError("a working system-call filter: a connection could be made")
    if (made := libc().fork()) >= 0:
        if made == 0:
            os._exit(0)
        raise IsolationError("a working system-call filter: another process could be made")
