"""What a process may take of the machine; a limit only ever gets lower."""

import resource
from collections.abc import Mapping
from pathlib import Path

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
