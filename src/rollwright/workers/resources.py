"""A watch on memory and file handles: stops opening episodes before the machine runs out, and says so.

`shortage` is the pure decision; `ResourceWatch` looks at the machine now and then and lets claims through or not.
Episodes that run already are left alone: they end by themselves and give back what they hold.
"""

import asyncio
import logging
import os
import resource
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class ResourceLimits:
    """How much must stay free."""

    memory_share: float = 0.05
    """Of the memory that the process may use."""
    file_share: float = 0.1
    """Of the file handles that the process may have."""


USUAL_LIMITS = ResourceLimits()


@dataclass(frozen=True)
class Resources:
    """What the machine has at one moment."""

    free_memory: int
    memory: int
    open_files: int
    most_files: int


def shortage(now: Resources, limits: ResourceLimits) -> str | None:
    """What is short, with the figures; `None` when there is enough of everything."""
    if now.free_memory < limits.memory_share * now.memory:
        free, whole = now.free_memory >> 20, now.memory >> 20
        return f"memory: {free} of {whole} MiB are free, {limits.memory_share:.0%} must be"
    if now.open_files > (1 - limits.file_share) * now.most_files:
        return f"file handles: {now.open_files} of {now.most_files} are in use, {limits.file_share:.0%} must be free"
    return None


def look() -> Resources:
    """What this machine has now; memory is the smaller of the machine's and the control group's."""
    free, memory = _machine_memory()
    limit, used = _group_memory()
    if limit is not None:
        free, memory = min(free, limit - used), min(memory, limit)
    try:
        open_files = len(os.listdir("/proc/self/fd"))
    except OSError:
        open_files = 0
    return Resources(free, memory, open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _machine_memory() -> tuple[int, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return pages, pages
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return found["MemAvailable"], found["MemTotal"]


def _group_memory() -> tuple[int | None, int]:
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return None, 0
    return (None if limit == "max" else int(limit)), used


class ResourceWatch:
    def __init__(self, limits: ResourceLimits) -> None:
        self._limits = limits
        self._enough = asyncio.Event()
        self._enough.set()
        self.shortage: str | None = None
        """What is short now."""

    async def enough(self) -> None:
        """Returns when an episode may be opened."""
        await self._enough.wait()

    async def run(self) -> None:
        while True:
            self.see(look())
            await asyncio.sleep(LOOK_SECONDS)

    def see(self, now: Resources) -> None:
        found = shortage(now, self._limits)
        if found is not None and self.shortage is None:
            logger.warning("no further episodes are opened for now: %s", found)
        elif found is None and self.shortage is not None:
            logger.warning("episodes are opened again: there is enough of everything")
        self.shortage = found
        if found is None:
            self._enough.set()
        else:
            self._enough.clear()
