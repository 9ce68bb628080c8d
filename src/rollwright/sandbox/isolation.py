"""Namespace, seccomp and rlimit setup for the sandbox's child process.

A confined process has no network, no other process, no files but its own tmpfs and the Python library (read-only), no
capabilities, an unprivileged user, and only the system calls that `rollwright.sandbox.seccomp` allows. Every step runs
when a sandbox starts; a step that the machine refuses raises `IsolationError` with one line.

The first half of the module wraps the Linux calls for which Python has no function; each raises `OSError` when the kernel
refuses.
"""

import ctypes
import math
import os
import platform
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from rollwright.sandbox.protocol import SandboxLimits, address_space, lower_rlimits
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

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
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


def check_result(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


@cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:4]]
    check_result(libc().prctl(option, *padded), f"prctl {option}")


def set_parent_death_signal() -> None:
    """Has the kernel kill this process when its parent exits; a change of user resets this."""
    prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def install_seccomp_filter(program: bytes) -> None:
    """Restricts this process and its children to the system calls that `program` allows; irreversible."""
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, then their address
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code)))
    prctl(_PR_SET_NO_NEW_PRIVS, 1)  # the kernel demands it of a process without CAP_SYS_ADMIN
    prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header))


def unshare(spaces: int) -> None:
    check_result(libc().unshare(ctypes.c_int(spaces)), "unshare")


def map_own_ids(user: int, group: int) -> None:
    """Maps this user and group to themselves in a new user namespace, and no other ids."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def drop_capabilities() -> None:
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    check_result(libc().capset(header, bytes(24)), "capset")


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

_LIBRARIES = tuple(map(Path, ("/lib", "/lib64", "/usr/lib", "/usr/lib64")))
"""Directories of the shared libraries that standard-library modules link to."""

_ROOT_SIZE = 1 << 20
"""Bytes; the root holds empty mount points only."""

_MAX_OPEN_FILES = 64
"""Bounds the kernel memory in pipe and socket buffers, which RLIMIT_AS does not count: their number times their size. The
filter keeps the sizes at 64 KiB for a pipe and `net.core.wmem_default` (usually 208 KiB) for a socket."""


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


def confine(limits: SandboxLimits, folders: Sequence[Path], needed: Sequence[Path]) -> None:
    """Confines this process, irreversibly. It must be the first process of the new namespaces, and must afterwards be able
    to read the files `needed`."""
    if (filter_code := compile_filter(SANDBOX_RULES)) is None:
        raise IsolationError(f"a system-call filter for {platform.machine()}")
    memory = address_space(limits.memory)  # reads /proc, which the new root does not have
    _require("an own root folder", lambda: _change_root(limits, folders))
    if os.geteuid() == 0:
        _require("an unprivileged user", become_nobody)
        _require("a user namespace", lambda: unshare(NEW_USER))
    _check_readable([standard_library() / "os.py", *needed])
    _require("a parent-death signal", set_parent_death_signal)  # after the change of user, which resets it
    _require("dropping capabilities", drop_capabilities)
    _set_rlimits(limits, memory)
    # Last, because the filter forbids most of the calls above.
    _require("a system-call filter", lambda: install_seccomp_filter(filter_code))
    _verify_filter()


def limit_without_namespaces(limits: SandboxLimits, folder: Path, needed: Sequence[Path]) -> None:
    """Applies rlimits and, where the machine has one, the seccomp filter; root becomes `nobody`, so no code runs as
    root."""
    os.chdir(folder)
    memory = address_space(limits.memory)
    if os.geteuid() == 0:
        _require("an unprivileged user", become_nobody)
    _check_readable(needed)
    _set_rlimits(limits, memory)
    if sys.platform == "linux" and (filter_code := compile_filter(SANDBOX_RULES)) is not None:
        with suppress(OSError):
            set_parent_death_signal()
            install_seccomp_filter(filter_code)


def _check_readable(needed: Sequence[Path]) -> None:
    for file in needed:
        try:
            with file.open("rb"):
                pass
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


def _change_root(limits: SandboxLimits, folders: Sequence[Path]) -> None:
    """Replaces the root by a read-only tmpfs with the readable directories bind-mounted and one writable tmpfs."""
    make_mounts_private()
    mount_tmpfs(_ROOT, _ROOT_SIZE, 0o755)
    work = _ROOT / WORK.relative_to("/")
    work.mkdir()
    mount_tmpfs(work, limits.disk, 0o777)
    for place in _outermost([*_LIBRARIES, standard_library(), *folders]):
        inside = _ROOT / place.relative_to("/")
        inside.parent.mkdir(parents=True, exist_ok=True)
        if place.is_symlink():
            inside.symlink_to(place.readlink())  # /lib is a link to usr/lib on merged-usr systems
        else:
            inside.mkdir(exist_ok=True)
            bind_read_only(place, inside)
    make_read_only(_ROOT)
    pivot_root(_ROOT)
    os.chdir(WORK)


def _outermost(places: Sequence[Path]) -> list[Path]:
    """The existing directories of `places` that are inside no other of them."""
    found = [each for each in dict.fromkeys(places) if each.is_dir()]
    return [each for each in found if not set(each.parents) & set(found)]


def _set_rlimits(limits: SandboxLimits, memory: Mapping[int, int]) -> None:
    lower_rlimits(
        {
            resource.RLIMIT_CPU: math.ceil(time.process_time()) + limits.cpu_seconds,
            resource.RLIMIT_FSIZE: limits.disk,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NPROC: 1 + limits.threads,
            resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
            **memory,
        }
    )


def _verify_filter() -> None:
    """Attempts two forbidden calls, to prove that the filter is active."""
    for name, attempt in (("a connection", socket.socket), ("another process", os.fork)):
        try:
            made = attempt()
        except OSError:
            continue
        if made == 0:
            os._exit(0)
        raise IsolationError(f"a working system-call filter: {name} could be made")
