"""The calls to Linux that Python has no function for. Each raises `OSError` when the kernel refuses."""

import ctypes
import os
import platform
import struct
from functools import cache
from pathlib import Path

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
