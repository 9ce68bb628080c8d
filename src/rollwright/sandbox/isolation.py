"""Namespace, seccomp and rlimit setup for the sandbox's child process.

A confined process has no network, no other process, no files but its own tmpfs and the Python library (read-only), no
capabilities, an unprivileged user, and only the system calls that `rollwright.sandbox.seccomp` allows. What is the same for
all sandboxes of a fork server is set up once (`enter_namespaces`, `build_root`), the rest in each sandbox (`confinement`, `confine`); a step
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
    """The C library. Types of arguments are declared here once: to make a value of `ctypes` for each costs a new sandbox
    several pages of memory."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl.argtypes = (ctypes.c_int, *4 * (ctypes.c_ulong,))
    library.unshare.argtypes = (ctypes.c_int,)
    library.setns.argtypes = (ctypes.c_int, ctypes.c_int)
    library.mount.argtypes = (*3 * (ctypes.c_char_p,), ctypes.c_ulong, ctypes.c_char_p)
    library.capset.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    return library


def prctl(option: int, second: int = 0, third: int = 0) -> None:
    if libc().prctl(option, second, third, 0, 0) < 0:
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

        self.calls = (
            (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),  # the kernel demands it of a process without CAP_SYS_ADMIN
            (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(self._header), 0, 0),
        )
        """Arguments of the calls of `prctl` that install it."""

    def install(self) -> None:
        """Restricts this process and its children to the system calls that the filter allows; irreversible."""
        for each in self.calls:
            prctl(*each[:3])


def install_seccomp_filter(program: bytes) -> None:
    """Installs the filter of these instructions."""
    SeccompFilter(program).install()


@cache
def quiet_fork() -> Callable[[], int]:
    """A function that forks this process, which must have one thread only, without Python's work after a fork. That makes
    locks anew that other threads may hold, and calls what modules registered: `random` would draw a new seed, for example."""
    function: Callable[[], int] = ctypes.PyDLL(None, use_errno=True).fork
    return function


def unshare(spaces: int) -> None:
    check_result(libc().unshare(spaces), "unshare")


def set_namespace(file: int, space: int) -> None:
    """Enters the namespace of an open file; a PID namespace is that of later children only."""
    check_result(libc().setns(file, space), "setns")


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


def make_mounts_private() -> None:
    """Keeps later mounts from propagating to other mount namespaces."""
    mount(None, "/", None, _MS_REC | _MS_PRIVATE, None)


def mount_tmpfs(at: Path, size: int, mode: int) -> None:
    """Mounts a tmpfs of `size` bytes."""
    _mount_tmpfs(os.fsencode(at), tmpfs_options(size, mode))


def tmpfs_options(size: int, mode: int) -> bytes:
    """Mount options of a tmpfs of `size` bytes; its inode limit is in proportion, because empty files take memory too."""
    inodes = max(_MIN_INODES, size // _BYTES_PER_INODE)
    return f"size={size},nr_inodes={inodes},mode={mode:o}".encode()


def _mount_tmpfs(at: bytes, options: bytes) -> None:
    if libc().mount(b"tmpfs", at, b"tmpfs", _MS_NOSUID | _MS_NODEV, options) != 0:
        check_result(-1, f"mount {os.fsdecode(at)}")


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
    result = libc().mount(texts[0], texts[1], texts[2], flags, texts[3])
    check_result(result, f"mount {at}")


_ROOT = Path("/proc")
"""Mount point of the sandbox's root while it is built: it exists everywhere and is not bind-mounted itself."""

WORK = Path("/tmp")
"""Working directory of the sandbox, the only writable one."""

_WORK_NAME = os.fsencode(WORK)

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
    root. Root enters its user namespace at the end of its `confinement`: until then it must read files that only root can."""
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


def mount_own_folder(tmpfs: bytes, hidden: HiddenFolders) -> None:
    """Enters a new mount namespace and mounts a tmpfs with these options there, which no other sandbox sees."""
    unshare(NEW_MOUNTS)
    _mount_tmpfs(_WORK_NAME, tmpfs)
    for source, at in hidden:
        os.makedirs(at, exist_ok=True)
        mount(source, at, None, _MS_BIND | _MS_REC, None)  # read-only like its source


Step = tuple[str, Callable[..., int | None], tuple[object, ...]]
"""A feature, the call that sets it up, and its arguments. A call of the C library that fails returns -1, one of Python's raises."""


def confinement(
    needed: Sequence[str], filter_code: SeccompFilter, proc: int
) -> tuple[Sequence[Step], Sequence[Step]]:
    """The steps that confine a process, irreversibly: those before and those after its rlimits are set. It must be the first
    process of its PID namespace, in a root of `build_root` with a folder of its own, and must afterwards be able to read the
    files `needed`. `proc`: descriptor of `/proc`, which the root does not have.

    The steps are laid out ahead, in the process that forks, because each page of memory that a new process writes to is
    copied, and in Python to look something up is to write."""
    user, group = os.geteuid(), os.getegid()
    before: list[Step] = [("an own folder", os.chdir, (os.fsencode(WORK),))]
    if user == 0:
        feature = "an unprivileged user"
        before += [
            (feature, os.setgroups, ([],)),
            (feature, os.setresgid, 3 * (NOBODY,)),
            (feature, os.setresuid, 3 * (NOBODY,)),
        ]
    before.append(("a user namespace", libc().unshare, (NEW_USER,)))
    if user != 0:
        before.append(("a user namespace", map_own_ids, (user, group, proc)))
    before += [
        ("a user namespace", os.close, (proc,)),
        ("", _check_readable, (needed,)),
        # after the change of user, which resets it
        ("a parent-death signal", libc().prctl, (_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)),
        ("dropping capabilities", libc().capset, (_CAPABILITY_HEADER, _NO_CAPABILITIES)),
    ]
    # last, because the filter forbids most of the calls above
    return before, [("a system-call filter", libc().prctl, each) for each in filter_code.calls]


def limit_steps(rlimits: Rlimits) -> Sequence[Step]:
    return [("limits", resource.setrlimit, each) for each in rlimits]


def confine(steps: Sequence[Step], connect: Callable[[int, int, int], int], fork: Callable[[], int]) -> None:
    """Takes the steps, and then attempts two forbidden calls, to prove that the filter is active. `connect`, `fork`: the C
    library's `socket` and `fork`."""
    for feature, call, arguments in steps:
        try:
            result = call(*arguments)
        except OSError as error:
            raise IsolationError(f"{feature}: {error.strerror or error}") from error
        if result == -1:
            raise IsolationError(f"{feature}: {os.strerror(ctypes.get_errno())}")
    if (made := connect(_AF_UNIX, _SOCK_STREAM, 0)) >= 0:
        os.close(made)
        raise IsolationError("a working system-call filter: a connection could be made")
    if (made := fork()) >= 0:
        if made == 0:
            os._exit(0)
        raise IsolationError("a working system-call filter: another process could be made")


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
