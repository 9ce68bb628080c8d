"""Messages between client, fork server and sandbox, their framing, and a sandbox's resource limits.

A frame is a length and a msgpack body. Replies may be forged by hostile code: a client decodes them as data and bounds
their size. A process's rlimits are only ever lowered.
"""

import os
import resource
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from rollwright.errors import ConfigError

_STATM = Path("/proc/self/statm")


class SandboxLimits(msgspec.Struct, frozen=True):
    """Resource limits of one sandbox."""

    seconds: float = 10.0
    """Time limit of one execution: the code is then interrupted, and killed if it does not stop."""
    cpu_seconds: int = 60
    """Processor time over the sandbox's lifetime."""
    memory: int = 512 << 20
    """Bytes beyond those that an idle sandbox uses."""
    disk: int = 64 << 20
    """Bytes of all its files together; they are on a tmpfs and deleted with the sandbox."""
    threads: int = 32
    """Threads beside the main one; further processes are refused."""
    output: int = 16_384
    """Characters of one execution's output that are kept; the number of dropped ones is reported."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"sandbox limits: {name} must be more than 0, got {getattr(self, name)}")


_MAX_OPEN_FILES = 64
"""Bounds the kernel memory in pipe and socket buffers, which RLIMIT_AS does not count: their number times their size. The
filter keeps the sizes at 64 KiB for a pipe and `net.core.wmem_default` (usually 208 KiB) for a socket."""

Rlimits = Sequence[tuple[int, tuple[int, int]]]
"""Kinds of limits with their soft and hard values."""


def rlimits_of(limits: SandboxLimits, used: int | None) -> Rlimits:
    """Limits for a child of this process, none above a present hard limit. `used`: bytes of its address space, if known."""
    wanted = {
        resource.RLIMIT_CPU: 1 + limits.cpu_seconds,  # what its start takes is no part of its time
        resource.RLIMIT_FSIZE: limits.disk,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 1 + limits.threads,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
    }
    if used is not None:
        wanted[resource.RLIMIT_AS] = used + limits.memory
    return [(kind, 2 * (_lowered(kind, limit),)) for kind, limit in wanted.items()]


def _lowered(kind: int, wanted: int) -> int:
    _, highest = resource.getrlimit(kind)
    return wanted if highest == resource.RLIM_INFINITY else min(wanted, highest)


def address_space() -> int | None:
    """Bytes of this process's address space; `None` without `/proc/self/statm`."""
    return int(_STATM.read_text().split()[0]) * resource.getpagesize() if _STATM.exists() else None


LENGTH = struct.Struct(">I")
"""Header of a frame: the length of its body in bytes."""


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def write_frame(to: IO[bytes], message: msgspec.Struct) -> None:
    to.write(frame(message))
    to.flush()


def read_frame(source: IO[bytes]) -> bytes | None:
    """Body of the next frame; `None` at the end of the stream."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = source.read(length)
    return body if len(body) == length else None


def send_frame(connection: int, message: msgspec.Struct) -> None:
    """As `write_frame`, to a descriptor. A file object allocates buffers, which a new sandbox has to copy or to clear."""
    unsent = memoryview(frame(message))
    while unsent:
        unsent = unsent[os.write(connection, unsent) :]


def receive_frame(connection: int) -> bytes | None:
    """As `read_frame`, from a descriptor."""
    head = _receive(connection, LENGTH.size)
    return None if head is None else _receive(connection, LENGTH.unpack(head)[0])


def _receive(connection: int, count: int) -> bytes | None:
    data = os.read(connection, count)
    while len(data) < count:
        more = os.read(connection, count - len(data))
        if not more:
            return None
        data += more
    return data


class StartRequest(msgspec.Struct, frozen=True):
    """Asks the fork server for a sandbox; the message carries the socket that the sandbox will serve."""

    limits: SandboxLimits
    is_confined: bool = True
    """Whether it requires namespaces, a seccomp filter and an unprivileged user; otherwise rlimits suffice."""


class ExecuteRequest(msgspec.Struct, frozen=True):
    """Asks a sandbox to execute code within a time limit."""

    code: str
    seconds: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """First message of a sandbox."""

    missing: str = ""
    """The isolation feature that the machine lacks, after which the sandbox ends; empty: the sandbox is confined."""


class ExecutionResult(msgspec.Struct, frozen=True, tag="ran"):
    """Result of one execution."""

    output: str
    """Printed text, and the value of the last expression."""
    error: str = ""
    """Traceback from the code's own first frame on; empty: the code completed."""
    is_late: bool = False
    """Whether the time limit interrupted it."""
    has_ended: bool = False
    """Whether the sandbox ended with it, and its state is lost."""


class Exited(msgspec.Struct, frozen=True, tag="ended"):
    """Last message of a sandbox: how its process exited."""

    signal: int
    """Signal that killed it; 0: it exited by itself."""


SandboxReply = Ready | ExecutionResult | Exited
