"""Records and leases of boxes on this machine, and the reaper that removes those that nobody holds.

Always true: a box has a folder with a record before it has anything else, and the folder is the last thing of it that goes.
A box may stay as long as its holder (the process that guards it) lives and its lease is renewed. So whatever is killed, and
after a loss of power, any process of this package finds what is left by the record, and by nothing else: processes by their
id and start time, groups and containers by the box's id, which is unique.

`is_abandoned` decides; `reap` acts, and may run in any number of processes at the same time.
"""

import hashlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from rollwright.sandbox import cgroups
from rollwright.sandbox.box import BoxLabel

STATE_VARIABLE = "ROLLWRIGHT_BOXES"
"""Environment variable with the folder of boxes and images; unset: the cache folder of this package."""
CACHE_VARIABLE = "ROLLWRIGHT_CACHE"
"""Environment variable with the cache folder of this package; unset: `rollwright` in the user's cache folder."""

RECORD, LEASE = "record.json", "lease"
_REMOTE = "-remote"
"""End of the ids of boxes that run elsewhere."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

GRACE_SECONDS = 1.0
"""Seconds after the end of its lease that a holder gets to remove its box itself."""

_UNREADABLE_SECONDS = 30.0
"""Age from which a folder without a readable record counts as left behind: its writer was killed."""

_COMMAND_SECONDS = 60.0


class BoxRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is written down of a box when it starts."""

    id: str
    backend: str
    label: BoxLabel
    image: str = ""
    boot_id: str
    holder: int
    """Process id of the holder; 0: the box has none, and only its lease counts."""
    holder_start: int
    """Start time of the holder in clock ticks since boot: process ids are used again."""
    created: float
    """Unix time."""
    remove: tuple[str, ...] = ()
    """Command that removes the container, for backends with containers."""
    remove_environment: dict[str, str] = {}
    """Environment of that command."""


def state_folder() -> Path:
    """The folder in which boxes and images of this user are kept."""
    given = os.environ.get(STATE_VARIABLE) or os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache).absolute() / "rollwright"


def boxes_folder(state: Path) -> Path:
    return state / "boxes"


def id_prefix(state: Path) -> str:
    """Begin of the ids of all boxes of this state folder: another folder's boxes are never touched."""
    return f"rw-{hashlib.sha256(os.fsencode(state)).hexdigest()[:8]}-"


def new_box_id(state: Path, *, is_remote: bool = False) -> str:
    return id_prefix(state) + secrets.token_hex(6) + (_REMOTE if is_remote else "")


def count_local_boxes(state: Path) -> int:
    """Boxes that take memory and cores of this machine."""
    try:
        return sum(not each.endswith(_REMOTE) for each in os.listdir(boxes_folder(state)))
    except OSError:
        return 0


def boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; `None`: there is no such process, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def now() -> float:
    """Seconds since boot, sleep included: what leases are measured by."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def write_record(folder: Path, record: BoxRecord) -> None:
    """Creates the box's folder with its record and a fresh lease."""
    folder.mkdir(parents=True, mode=0o700)
    renew(folder, record.label.lease_seconds)
    _write(folder / RECORD, msgspec.json.encode(record))


def rewrite_record(folder: Path, record: BoxRecord) -> None:
    _write(folder / RECORD, msgspec.json.encode(record))


def read_record(folder: Path) -> BoxRecord | None:
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=BoxRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def renew(folder: Path, seconds: float) -> None:
    _write(folder / LEASE, repr(now() + seconds).encode())


def lease_end(folder: Path) -> float | None:
    try:
        return float((folder / LEASE).read_bytes())
    except (OSError, ValueError):
        return None


def _write(file: Path, content: bytes) -> None:
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(file)


def is_abandoned(
    record: BoxRecord, *, boot: str, holder_start: int | None, lease_end: float | None, at: float
) -> bool:
    """Whether nobody holds the box any more. `holder_start`: of the process that has the holder's id now."""
    if record.boot_id != boot:
        return True
    if record.holder and holder_start != record.holder_start:
        return True
    return lease_end is None or at > lease_end + (GRACE_SECONDS if record.holder else 0.0)


def list_records(state: Path) -> list[BoxRecord]:
    """Records of all boxes, the oldest first."""
    try:
        folders = list(boxes_folder(state).iterdir())
    except OSError:
        return []
    found = [record for each in folders if (record := read_record(each)) is not None]
    return sorted(found, key=lambda each: each.created)


def reap(state: Path) -> list[str]:
    """Removes all boxes that nobody holds; returns their ids."""
    removed = []
    try:
        folders = list(boxes_folder(state).iterdir())
    except OSError:
        folders = []
    for folder in folders:
        record = read_record(folder)
        if record is None:
            if _age(folder) > _UNREADABLE_SECONDS:
                remove_folder(folder)
                removed.append(folder.name)
            continue
        holder_start = start_time(record.holder)
        if is_abandoned(
            record, boot=boot_id(), holder_start=holder_start, lease_end=lease_end(folder), at=now()
        ):
            if record.boot_id == boot_id() and record.holder and holder_start == record.holder_start:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(record.holder, signal.SIGKILL)  # it hangs; the kernel ends its box with it
            if remove_box(folder, record):
                removed.append(record.id)
    known = {each.name for each in folders}
    prefix = id_prefix(state)
    for box_id in cgroups.all_groups():
        if box_id.startswith(prefix) and box_id not in known and not (boxes_folder(state) / box_id).exists():
            _kill_all(box_id)
            cgroups.remove(box_id)
    return removed


def remove_box(folder: Path, record: BoxRecord) -> bool:
    """Removes everything of a box, its folder last; returns whether nothing is left."""
    if record.remove and record.boot_id:
        try:
            done = subprocess.run(
                record.remove,
                capture_output=True,
                timeout=_COMMAND_SECONDS,
                stdin=subprocess.DEVNULL,
                env=record.remove_environment,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        if done.returncode != 0:
            return False
    _kill_all(record.id)
    if not cgroups.remove(record.id):
        return False
    remove_folder(folder)
    return not folder.exists()


def _kill_all(box_id: str) -> None:
    """Kills what is left in the box's own groups; the groups are the box's, so no other process can be in them."""
    groups = cgroups.group_folders(box_id)
    with suppress(OSError):
        cgroups.thaw(groups)  # a frozen process does not die
    for pid in cgroups.processes_in(groups):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def remove_folder(folder: Path) -> None:
    """Deletes a folder with whatever modes a box has given to what is in it; the record goes last."""

    def open_up(function: object, path: str, info: object) -> None:
        with suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            os.chmod(path, 0o700, follow_symlinks=False) if os.path.isdir(path) and not os.path.islink(
                path
            ) else None
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                os.unlink(path)

    with suppress(OSError):
        for each in sorted(folder.iterdir(), key=lambda each: each.name in (RECORD, LEASE)):
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, onerror=open_up)
            else:
                each.unlink(missing_ok=True)
        folder.rmdir()


def _age(folder: Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except OSError:
        return 0.0
