"""Linux calls for entering the namespaces of a box and giving up rights there; each raises `OSError` when refused."""

import os
import struct
from pathlib import Path
from typing import NamedTuple

from rollwright.sandbox.isolation import (
    NEW_IPC,
    NEW_MOUNTS,
    NEW_NETWORK,
    NEW_PIDS,
    NEW_USER,
    check_result,
    libc,
    mount,
    prctl,
    set_namespace,
)

NEW_UTS, NEW_CGROUPS = 0x0400_0000, 0x0200_0000
WHOLE_BOX = NEW_USER | NEW_MOUNTS | NEW_PIDS | NEW_NETWORK | NEW_IPC | NEW_UTS | NEW_CGROUPS

_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE = 24, 38, 4
_CAPABILITY_VERSION = 0x2008_0522
_LAST_CAPABILITY = Path("/proc/sys/kernel/cap_last_cap")

BOX_CAPABILITIES = {
    "chown": 0,
    "dac_override": 1,
    "fowner": 3,
    "fsetid": 4,
    "kill": 5,
    "setgid": 6,
    "setuid": 7,
    "setpcap": 8,
    "net_bind_service": 10,
    "net_raw": 13,
    "sys_chroot": 18,
    "audit_write": 29,
    "setfcap": 31,
}
"""Capabilities of root in a box, and in its user namespace only: Docker's default set without making device nodes."""


class BoxUser(NamedTuple):
    """A user as a box's own files define it."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    name: str


def enter(process: int, spaces: int) -> None:
    """Enters namespaces of a process; a PID namespace is that of later children only."""
    file = os.pidfd_open(process)
    try:
        set_namespace(file, spaces)
    finally:
        os.close(file)


def mount_overlay(at: str, lower: list[str], upper: str, work: str) -> None:
    """Mounts `lower`, topmost first, with a writable layer; `userxattr` is what a user namespace may use."""
    escaped = ":".join(each.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,") for each in lower)
    mount("overlay", at, "overlay", 0, f"lowerdir={escaped},upperdir={upper},workdir={work},userxattr")


def mount_tmpfs(at: str, size: int) -> None:
    mount("tmpfs", at, "tmpfs", 0, f"size={size},mode=755")


def keep_capabilities(kept: int) -> None:
    """Gives up all capabilities but those in the bit set, also for programs that are executed later."""
    for number in range(_count_capabilities()):
        if not kept >> number & 1:
            prctl(_PR_CAPBSET_DROP, number)
    low, high = kept & 0xFFFF_FFFF, kept >> 32
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    check_result(libc().capset(header, struct.pack("IIIIII", low, low, 0, high, high, 0)), "capset")


def _count_capabilities() -> int:
    try:
        return int(_LAST_CAPABILITY.read_text()) + 1
    except OSError:
        return 41


def forbid_new_rights() -> None:
    """No program executed later gains rights by a set-user-id bit, and no other process may trace this one."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_DUMPABLE, 0)


def find_user(given: str, passwd: Path = Path("/etc/passwd"), group: Path = Path("/etc/group")) -> BoxUser:
    """The user `name`, `number` or `name:group` in the files of the box; a `LookupError` says that there is none."""
    name, _, group_name = (given or "0").partition(":")
    rows = [line.split(":") for line in _lines(passwd)]
    row = next((each for each in rows if len(each) > 5 and name in (each[0], each[2])), None)
    if row is None:
        if not name.isdecimal():
            raise LookupError(f"no user {name!r} in {passwd}")
        row = [name, "", name, "0", "", "/root" if name == "0" else "/"]
    groups = [line.split(":") for line in _lines(group)]
    gid = int(row[3])
    if group_name:
        found = next((each for each in groups if len(each) > 2 and group_name in (each[0], each[2])), None)
        if found is None and not group_name.isdecimal():
            raise LookupError(f"no group {group_name!r} in {group}")
        gid = int(found[2] if found is not None else group_name)
    further = tuple(int(each[2]) for each in groups if len(each) > 3 and row[0] in each[3].split(","))
    return BoxUser(int(row[2]), gid, (gid, *(each for each in further if each != gid)), row[5] or "/", row[0])


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []
