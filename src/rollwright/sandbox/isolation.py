"""The calls to Linux that Python has no function for. Each raises `OSError` when the kernel refuses.

The walls of a sandbox, put up by the process that will be behind them.

Behind them are: no network, no other process, no file but its own in memory and the Python library for reading, no
capability, an unprivileged user, and the system calls of a program that computes. Everything is tried when a sandbox
starts; what the machine refuses is `Missing`, in one line.
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

from rollwright.sandbox.protocol import SandboxLimits, address_space, lower
from rollwright.sandbox.seccomp import COMPUTING, program

NOBODY = 65534
"""User and group id of `nobody` on Linux."""

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = (
    0x0002_0000,
    0x0800_0000,
    0x1000_0000,
    0x2000_0000,
    0x4000_0000,
)
"""What `unshare` can give a process of its own."""

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
"""The one flag that `statvfs` numbers differently from `mount`."""
_MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_FEWEST_FILES, _BYTES_PER_FILE = 1024, 1 << 14
"""How many files a folder in memory takes: each costs the kernel about 1 kB beside its size."""
_CAPABILITY_VERSION = 0x2008_0522


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(_libc().prctl(option, *padded), f"prctl {option}")


def die_with_parent() -> None:
    """A change of user takes this back."""
    prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def filter_calls(program: bytes) -> None:
    """For good, and for all children: only the system calls that `program` lets through."""
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code)))
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header))


def unshare(spaces: int) -> None:
    _checked(_libc().unshare(ctypes.c_int(spaces)), "unshare")


def keep_own_ids(user: int, group: int) -> None:
    """In a new user namespace: the ids from outside stay what they are, and there are no others."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def drop_capabilities() -> None:
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    _checked(_libc().capset(header, bytes(24)), "capset")


def keep_mounts_private() -> None:
    """What is mounted from here on is seen by nobody else."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE, None)


def mount_memory(at: Path, size: int, mode: int) -> None:
    """A folder in memory that takes `size` bytes, and files in proportion: empty ones take memory too."""
    files = max(_FEWEST_FILES, size // _BYTES_PER_FILE)
    options = f"size={size},nr_inodes={files},mode={mode:o}"
    _mount("tmpfs", str(at), "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def make_read_only(at: Path) -> None:
    _mount(None, str(at), None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV, None)


def show_read_only(source: Path, at: Path) -> None:
    """`source` is seen at `at` too, and cannot be changed there."""
    _mount(str(source), str(at), None, _MS_BIND | _MS_REC, None)
    had = os.statvfs(source).f_flag  # what is set already may not be taken back by an unprivileged user
    kept = had & (_MS_NOEXEC | _MS_NOATIME | _MS_NODIRATIME)
    kept |= _MS_RELATIME if had & _ST_RELATIME else 0
    flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | kept
    _mount(None, str(at), None, flags, None)


def change_root(folder: Path) -> None:
    """`folder`, a mount of its own, becomes all that there is."""
    os.chdir(folder)
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(f"pivot_root: its number on {platform.machine()} is not known here")
    _checked(_libc().syscall(number, b".", b"."), "pivot_root")
    _checked(_libc().umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")


def _mount(source: str | None, at: str, kind: str | None, flags: int, options: str | None) -> None:
    texts = [None if each is None else os.fsencode(each) for each in (source, at, kind, options)]
    result = _libc().mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _checked(result, f"mount {at}")


_ROOT = Path("/proc")
"""Where the sandbox's root is built: a folder that exists and that nothing is shown from."""

WORK = Path("/tmp")
"""The sandbox's working folder, the only one it can write to."""

_LIBRARIES = tuple(map(Path, ("/lib", "/lib64", "/usr/lib", "/usr/lib64")))
"""Where modules of the standard library find what they link to."""

_ROOT_SIZE = 1 << 20
"""Bytes: empty folders only."""

_MAX_OPEN_FILES = 64
"""What lies in a pipe or a pair of sockets is memory of the kernel, outside the limit. Their number times their size,
which cannot be raised (64 KiB, and what `net.core.wmem_default` says, usually 208 KiB), is what all of them can hold."""


class Missing(Exception):
    """The machine cannot give what a sandbox needs."""


def standard_library() -> Path:
    """Also for an interpreter in an environment of its own, which has none."""
    return Path(os.__file__).resolve().parent


def enter_namespaces() -> None:
    """Own network, processes, mounts and messages, for the children of this process. Root gets its user namespace at
    the end of `lock_in`: until then it needs to see what only root sees."""
    spaces = NEW_NETWORK | NEW_PIDS | NEW_MOUNTS | NEW_IPC
    user, group = os.geteuid(), os.getegid()
    _needed("namespaces", lambda: unshare(spaces if user == 0 else spaces | NEW_USER))
    if user != 0:
        _needed("a user namespace", lambda: keep_own_ids(user, group))


def lock_in(limits: SandboxLimits, folders: Sequence[Path], needed: Sequence[Path]) -> None:
    """For good. Called by the first process of the new namespaces; `needed` are files it must be able to read."""
    if (calls := program(COMPUTING)) is None:
        raise Missing(f"a system-call filter: none is known for {platform.machine()}")
    memory = address_space(limits.memory)
    _needed("an own root folder", lambda: _change_root(limits, folders))
    if os.geteuid() == 0:
        _needed("an unprivileged user", become_nobody)
        _needed("a user namespace", lambda: unshare(NEW_USER))
    _readable([standard_library() / "os.py", *needed])
    _needed("an end with its parent", die_with_parent)
    _needed("an end of capabilities", drop_capabilities)
    _limit(limits, memory)
    _needed("a system-call filter", lambda: filter_calls(calls))
    _prove()


def make_do(limits: SandboxLimits, folder: Path, needed: Sequence[Path]) -> None:
    """What can be had without namespaces: limits, the user `nobody` where root starts it, and the filter. Nothing runs
    as root."""
    os.chdir(folder)
    memory = address_space(limits.memory)
    if os.geteuid() == 0:
        _needed("an unprivileged user", become_nobody)
    _readable(needed)
    _limit(limits, memory)
    if sys.platform == "linux" and (calls := program(COMPUTING)) is not None:
        with suppress(OSError):
            die_with_parent()
            filter_calls(calls)


def _readable(needed: Sequence[Path]) -> None:
    for file in needed:
        try:
            with file.open("rb"):
                pass
        except OSError as error:
            raise Missing(
                f"the right of an unprivileged user to read {file} ({error.strerror}); let others read that "
                f"folder (chmod -R o+rX), or start as a user other than root"
            ) from error


def _needed(what: str, step: Callable[[], None]) -> None:
    try:
        step()
    except OSError as error:
        raise Missing(f"{what}: {error.strerror or error}") from error


def _change_root(limits: SandboxLimits, folders: Sequence[Path]) -> None:
    """A root with nothing in it but what may be read, and a folder in memory to write to."""
    keep_mounts_private()
    mount_memory(_ROOT, _ROOT_SIZE, 0o755)
    work = _ROOT / WORK.relative_to("/")
    work.mkdir()
    mount_memory(work, limits.disk, 0o777)
    for place in _outermost([*_LIBRARIES, standard_library(), *folders]):
        inside = _ROOT / place.relative_to("/")
        inside.parent.mkdir(parents=True, exist_ok=True)
        if place.is_symlink():
            inside.symlink_to(place.readlink())
        else:
            inside.mkdir(exist_ok=True)
            show_read_only(place, inside)
    make_read_only(_ROOT)
    change_root(_ROOT)
    os.chdir(WORK)


def _outermost(places: Sequence[Path]) -> list[Path]:
    """Those that exist, without those inside another."""
    found = [each for each in dict.fromkeys(places) if each.is_dir()]
    return [each for each in found if not set(each.parents) & set(found)]


def _limit(limits: SandboxLimits, memory: Mapping[int, int]) -> None:
    lower(
        {
            resource.RLIMIT_CPU: math.ceil(time.process_time()) + limits.cpu_seconds,
            resource.RLIMIT_FSIZE: limits.disk,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NPROC: 1 + limits.threads,
            resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
            **memory,
        }
    )


def _prove() -> None:
    """Tries what must not work."""
    for what, attempt in (("a connection", socket.socket), ("another process", os.fork)):
        try:
            made = attempt()
        except OSError:
            continue
        if made == 0:
            os._exit(0)
        raise Missing(f"a system-call filter that holds: {what} could be made")
