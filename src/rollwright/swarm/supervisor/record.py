"""The state of a supervisor as a file, `supervisor.json`, which is replaced atomically.

One supervisor at a time holds a node's folder; the kernel releases the lock with its process.
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
    """What a supervisor does now."""

    RUNNING = "running"
    """The node's process runs."""
    WAITING = "waiting"
    """The node has exited and will be restarted."""
    ENDED = "ended"
    """No further restart will follow."""


class Restarted(msgspec.Struct, frozen=True):
    """One exit of the node."""

    time: float
    """Seconds since 1970."""
    ending: str
    """An `ExitCause`."""
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
    """The mark of all processes that the node has started."""
    starts: int
    """Starts of the node by this supervisor."""
    endings: dict[str, int]
    """Exits, by cause."""
    last: list[Restarted]
    """The last exits, the newest at the end."""
    reason: str
    """Why it is in this state."""
    oom_fallbacks: list[str] = []
    """Settings that were made smaller after the node ran out of memory."""
    next_start: float | None = None
    """Time of the next restart, in seconds since 1970, while it waits."""


def write_record(folder: Path, record: SupervisorRecord) -> None:
    file = folder / RECORD
    partial = file.with_name(f"{RECORD}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    partial.replace(file)


def read_record(folder: Path) -> SupervisorRecord | None:
    """`None` if the file is missing or malformed."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=SupervisorRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def is_supervised(folder: Path) -> bool:
    """Whether a supervisor holds the folder's lock."""
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
    """Lock the folder until the returned file is closed or the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    # Not inherited by the node, which may outlive its supervisor by some seconds.
    lock = os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        found = read_record(folder)
        who = f" (process {found.pid})" if found is not None else ""
        raise RollwrightError(f"{folder}: is supervised already{who}; stop that one first") from error
    return lock
