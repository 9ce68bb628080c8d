"""What a supervisor lets others see of it: `supervisor.json`, whole or the one before, whenever it dies.

One supervisor at a time holds a node's folder; the lock goes with its process.
"""

import fcntl
import os
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

import msgspec

from rollwright.errors import RollwrightError

RECORD, LOCK = "supervisor.json", "supervisor.lock"


class SupervisorState(StrEnum):
    """What a supervisor is at."""

    RUNNING = "running"
    """The node's process lives."""
    WAITING = "waiting"
    """The node has died and will be started again."""
    ENDED = "ended"
    """Nothing will be started any more."""


class Restarted(msgspec.Struct, frozen=True):
    """A death, and what was done about it."""

    time: float
    """Seconds since 1970."""
    ending: str
    """As `Ending` names it."""
    reason: str


class SupervisorRecord(msgspec.Struct, frozen=True):
    """`supervisor.json`."""

    pid: int
    state: SupervisorState
    started: float
    """Seconds since 1970."""
    command: list[str]
    node_pid: int | None
    life: str | None
    """Marks all that the node has started."""
    starts: int
    """Of the node, by this supervisor."""
    endings: dict[str, int]
    """How often a life ended how."""
    last: list[Restarted]
    """The newest at the end."""
    oom_fallbacks: list[str]
    """Settings that were made smaller for want of memory."""
    reason: str
    """Why it is as it is."""
    next_start: float | None = None
    """Seconds since 1970; of one that waits."""


def write_record(folder: Path, record: SupervisorRecord) -> None:
    file = folder / RECORD
    partial = file.with_name(f"{RECORD}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    partial.replace(file)


def read_record(folder: Path) -> SupervisorRecord | None:
    """`None`: there is none, or it is not one."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=SupervisorRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def is_supervised(folder: Path) -> bool:
    """Whether a supervisor holds the folder now."""
    try:
        lock = (folder / LOCK).open("rb")
    except OSError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def hold(folder: Path) -> BinaryIO:
    """The folder's lock, until the file is closed or the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    # not inherited by the node: it may outlive its supervisor by some seconds
    lock = os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        found = read_record(folder)
        who = f" (process {found.pid})" if found is not None else ""
        raise RollwrightError(f"{folder}: is supervised already{who}; stop that one first") from error
    return lock
