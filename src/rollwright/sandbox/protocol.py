"""What a process may take of the machine; a limit only ever gets lower.

Messages between processes: frames of a length and msgpack.

Plain data: what a sandbox is asked and what it answers. What it answers may be made by hostile code.
"""

import resource
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from rollwright.errors import ConfigError

_STATM = Path("/proc/self/statm")


class SandboxLimits(msgspec.Struct, frozen=True):
    """What one sandbox may take."""

    seconds: float = 10.0
    """For one execution; then it is interrupted, and ended if it does not stop."""
    cpu_seconds: int = 60
    """Processor time over the sandbox's whole life."""
    memory: int = 512 << 20
    """Bytes beyond what an empty sandbox has."""
    disk: int = 64 << 20
    """Bytes of all its files together; they are in memory, and end with it."""
    threads: int = 32
    """Beside the main one. There is one process and never another."""
    output: int = 16_384
    """Characters of one execution's output that are kept; how many were not is said."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"sandbox limits: {name} must be more than 0, got {getattr(self, name)}")


def lower(limits: Mapping[int, int]) -> None:
    """Sets soft and hard limits of this process, none above what holds already."""
    for kind, wanted in limits.items():
        _, highest = resource.getrlimit(kind)
        limit = wanted if highest == resource.RLIM_INFINITY else min(wanted, highest)
        resource.setrlimit(kind, (limit, limit))


def address_space(memory: int) -> dict[int, int]:
    """The limit that leaves `memory` bytes beyond what is in use now; none where that cannot be found out."""
    if not _STATM.exists():
        return {}
    return {resource.RLIMIT_AS: int(_STATM.read_text().split()[0]) * resource.getpagesize() + memory}


LENGTH = struct.Struct(">I")
"""What stands before each frame: its length in bytes."""


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def write_frame(to: IO[bytes], message: msgspec.Struct) -> None:
    to.write(frame(message))
    to.flush()


def read_frame(source: IO[bytes]) -> bytes | None:
    """`None` at the end of the stream."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = source.read(length)
    return body if len(body) == length else None


class Start(msgspec.Struct, frozen=True):
    """To the nursery, together with one end of a socket: a new sandbox, which talks there."""

    limits: SandboxLimits
    folders: tuple[str, ...] = ()
    """Folders that its code may read and import from, beside the standard library."""
    is_confined: bool = True
    """Whether it needs namespaces, a filter and an unprivileged user; otherwise limits have to do."""


class Run(msgspec.Struct, frozen=True):
    code: str
    seconds: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The first word of a sandbox."""

    missing: str = ""
    """What the machine cannot give, for which reason the sandbox has ended; empty: it is locked in."""


class Ran(msgspec.Struct, frozen=True, tag="ran"):
    """One execution."""

    output: str
    """What it printed, and the value of the last expression."""
    error: str = ""
    """The traceback, as far as it is the code's own; empty: it ran to its end."""
    is_late: bool = False
    """Whether it was interrupted because its time was up."""
    has_ended: bool = False
    """Whether the sandbox ended with it, and all its state."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The last word: how the process ended."""

    signal: int
    """0: it ended itself."""


Reply = Ready | Ran | Ended
