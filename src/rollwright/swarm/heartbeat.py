"""The files by which a node shows its state: a heartbeat that counts progress, and a status after each round.

Invariants: both files are replaced atomically. The heartbeat counts progress, not life: it moves when a phase begins and
when work inside it is done, so a node that hangs stops beating though its process lives. A watcher compares `beat` over its
own clock and need not trust the node's.
"""

import os
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec

HEARTBEAT, STATUS = "heartbeat.json", "status.json"

LEAST_SECONDS = 0.2
"""Least time between two writes inside a phase: rollouts may end much faster than any watcher reads."""


class NodePhase(StrEnum):
    """The phase of a node's round."""

    START = "start"
    """Loading the model, joining the swarm, restoring the last checkpoint."""
    GENERATE = "generate"
    """Playing its own groups."""
    SHARE = "share"
    """Publishing the own groups whose rewards differ."""
    SAMPLE = "sample"
    """Selecting, fetching and verifying groups of peers."""
    TRAIN = "train"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"
    STOPPED = "stopped"
    """Ended by itself or on request."""


class Heartbeat(msgspec.Struct, frozen=True):
    """`heartbeat.json`."""

    pid: int
    beat: int
    """Grows with every bit of progress, from 1 in each process."""
    time: float
    """Seconds since 1970, by the node's clock."""
    round: int
    phase: NodePhase
    rounds_done: int
    """Over all restarts."""


class PeerStatus(msgspec.Struct, frozen=True):
    """A peer, as this node sees it."""

    name: str
    """Readable name, derived from the key."""
    peer: str
    alive: bool
    round: int | None
    """The last round that it announced."""


class RoundStatus(msgspec.Struct, frozen=True):
    """The result of one round."""

    round: int
    reward: float | None
    """Mean over the own rollouts; `None` when all of them failed."""
    own_groups: int
    """Trained on."""
    foreign_groups: int
    """Trained on."""
    evaluation: float | None = None
    """Mean reward of the validation after it; `None`: there was none."""


class NodeStatus(msgspec.Struct, frozen=True):
    """`status.json`."""

    name: str
    peer: str
    swarm: str
    time: float
    """When it was written, by the node's clock."""
    version: int
    """Version of the weights: the number of updates."""
    rounds_done: int
    rounds: list[RoundStatus]
    """The last rounds, the newest at the end."""
    peers: list[PeerStatus]
    """Peers of which a signed message has arrived."""
    accepted: int
    """Foreign groups accepted since the process started."""
    shared: int
    """Own groups announced."""
    refused: dict[str, int]
    """Refused manifests and groups, by reason."""
    quarantined: list[str]
    """Names of the peers in quarantine."""
    strangers: int = 0
    """Peers that were only heard of and have signed nothing yet."""


class Pulse:
    """Writes a node's heartbeat. Safe to use from threads."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._file = folder / HEARTBEAT
        self._clock = clock
        self._lock = threading.Lock()
        self._beat = 0
        self._round = 0
        self._phase = NodePhase.START
        self._rounds_done = 0
        self._written = float("-inf")

    def enter(self, phase: NodePhase, round: int, rounds_done: int) -> None:
        """Begin a phase."""
        with self._lock:
            self._phase, self._round, self._rounds_done = phase, round, rounds_done
            self._write()

    def progress(self) -> None:
        """Count progress inside the phase."""
        with self._lock:
            self._beat += 1
            if time.monotonic() - self._written >= LEAST_SECONDS:
                self._write()

    def _write(self) -> None:
        self._beat += 1
        self._written = time.monotonic()
        now = Heartbeat(os.getpid(), self._beat, self._clock(), self._round, self._phase, self._rounds_done)
        _replace(self._file, now)


def write_status(folder: Path, status: NodeStatus) -> None:
    _replace(folder / STATUS, status)


def read_heartbeat(folder: Path) -> Heartbeat | None:
    """`None` if the file is missing or malformed."""
    return _read(folder / HEARTBEAT, Heartbeat)


def read_status(folder: Path) -> NodeStatus | None:
    """`None` if the file is missing or malformed."""
    return _read(folder / STATUS, NodeStatus)


Record = TypeVar("Record")


def _replace(file: Path, record: msgspec.Struct) -> None:
    partial = file.with_name(f"{file.name}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    partial.replace(file)


def _read(file: Path, record: type[Record]) -> Record | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=record)
    except (OSError, msgspec.MsgspecError):
        return None
