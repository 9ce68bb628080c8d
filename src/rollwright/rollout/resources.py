"""Admission control by memory and file handles: limits episodes before the process or the machine runs out, and logs why.

`shortage` and `ceiling` are the pure decisions; `ResourceWatch` measures the machine periodically and admits episodes or
not. Running episodes are not stopped: they end by themselves and release their resources.

Always true: the cost of one episode is learned from running ones, so that a burst of new episodes cannot exceed the
available resources; with `least` set, that many episodes run in any case, because otherwise nothing would free resources.
"""

import asyncio
import contextlib
import logging
import math
import os
import resource
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path

from rollwright.hardware import Cgroups

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0

LOOK_AGAIN_SECONDS = 0.2
"""Age of a measurement after which a new episode triggers another; one costs a few hundred microseconds."""

LEAST_EPISODE_MEMORY = 1 << 20
"""Lower bound of the estimated memory of an episode, in bytes, while few are known."""

WELL_KNOWN = 64
"""Episodes whose mean cost says little yet. With more of them, all together still count for what so many would take at
least: a hundred thousand small episodes fit where each of them would be refused a megabyte."""

CAUTIOUS_MEMORY, CAUTIOUS_FILES = 64 << 20, 4
"""Estimated cost of an episode before the first measurement."""

FEWEST_AT_FIRST = 4
"""Episodes that are admitted to measure their cost."""

MARGIN = 1.25
"""Factor on the measured cost of an episode, because some have just begun and hold nothing yet."""

FADING = 0.98
"""Decay of the measured cost per measurement, so that a single outlier fades."""

FEWEST_FILES = 4
"""File handles that are always kept free: for a store's log, a name lookup, a line of output."""


TOLD_AGAIN = 0.8
"""A new ceiling is logged if it is below this share of the last logged one."""


@dataclass(frozen=True)
class ResourceLimits:
    """Resources that must stay free."""

    memory_share: float = 0.05
    """Share of the memory that the process may use."""
    file_share: float = 0.1
    """Share of the file handles that the process may open."""
    least: int = 0
    """Episodes that are played in any case."""


USUAL_LIMITS = ResourceLimits()


@dataclass(frozen=True)
class MachineResources:
    """Memory and file handles at one moment."""

    free_memory: int
    memory: int
    open_files: int
    most_files: int
    used_memory: int = 0
    """Memory of this process, measured as the limit that applies to it is."""


@dataclass(frozen=True)
class EpisodeCost:
    """Measured cost of one episode; `expected` is the estimate."""

    memory: float = 0.0
    files: float = 0.0

    def expected(self, episodes: int) -> "EpisodeCost":
        """Cost to reckon with, measured on so many episodes."""
        doubt = min(1.0, WELL_KNOWN / max(1, episodes))
        return EpisodeCost(max(self.memory, doubt * LEAST_EPISODE_MEMORY), max(self.files, doubt))

    def seen(self, now: MachineResources, before: MachineResources, episodes: int) -> "EpisodeCost":
        """With one look more; `before`: without any episode."""
        if not episodes:
            return self
        memory = MARGIN * (now.used_memory - before.used_memory) / episodes
        files = MARGIN * (now.open_files - before.open_files) / episodes
        return EpisodeCost(max(memory, FADING * self.memory), max(files, FADING * self.files))

    def yet_to_take(self, now: MachineResources, before: MachineResources, episodes: int) -> "EpisodeCost":
        """What the episodes that are there will take beyond what they have taken, all together."""
        memory = max(0, now.used_memory - before.used_memory)
        files = max(0, now.open_files - before.open_files)
        return EpisodeCost(max(0.0, episodes * self.memory - memory), max(0.0, episodes * self.files - files))


def shortage(now: MachineResources, limits: ResourceLimits) -> str | None:
    """The scarce resource with its numbers; `None` if there is enough of everything."""
    if now.free_memory < limits.memory_share * now.memory:
        free, whole = now.free_memory >> 20, now.memory >> 20
        return f"memory: {free} of {whole} MiB are free, {limits.memory_share:.0%} must be"
    if now.open_files > (1 - limits.file_share) * now.most_files:
        return f"file handles: {now.open_files} of {now.most_files} are in use, {limits.file_share:.0%} must be free"
    return None


def ceiling(
    now: MachineResources, before: MachineResources, limits: ResourceLimits, cost: EpisodeCost, episodes: int
) -> tuple[int, str]:
    """How many episodes there may be until the next look, with `episodes` there now, and what is short; empty: nothing.
    `before`: without any episode, so that those which have just come count for what they are yet to take.

    As many more as there is room for, by what they were seen to take. Twice as many at the most, unless there is room for
    more even if they took far more: what they take shows only when they are there."""
    cost = cost.expected(episodes)
    coming = cost.yet_to_take(now, before, episodes)
    files = (
        now.most_files - max(limits.file_share * now.most_files, FEWEST_FILES) - now.open_files - coming.files
    )
    memory = now.free_memory - limits.memory_share * now.memory - coming.memory
    by_files, by_memory = math.floor(files / cost.files), math.floor(memory / cost.memory)
    unseen = math.floor(min(memory / CAUTIOUS_MEMORY, files / CAUTIOUS_FILES))
    more = max(FEWEST_AT_FIRST, episodes, unseen)
    why = ""
    if by_memory < min(more, by_files):
        why = f"{now.free_memory >> 20} of {now.memory >> 20} MiB of memory are free"
    elif by_files < more:
        why = f"{now.open_files} of {now.most_files} file handles are in use"
    return max(episodes + min(more, by_files, by_memory), limits.least), why


def look() -> MachineResources:
    """What this process can have now; memory is the tightest of the machine's, the control group's and the process's."""
    free, memory = _machine_memory()
    used = _process_memory()
    limit = Cgroups().free_memory()
    if limit is not None and limit < free:
        free, memory = limit, min(memory, limit + used.resident)
    for name, taken in ((resource.RLIMIT_AS, used.address_space), (resource.RLIMIT_DATA, used.data)):
        most = resource.getrlimit(name)[0]
        if most != resource.RLIM_INFINITY and most - taken < free:
            free, memory, used = max(0, most - taken), most, replace(used, resident=taken)
    try:
        open_files = len(os.listdir("/proc/self/fd"))
    except OSError:
        open_files = 0
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MachineResources(free, memory, open_files, most_files, used.resident)


@dataclass(frozen=True)
class _Memory:
    """Of this process, in bytes."""

    address_space: int
    data: int
    """What it may write to."""
    resident: int


def _process_memory() -> _Memory:
    try:
        pages = Path("/proc/self/statm").read_text().split()
    except OSError:
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return _Memory(taken, taken, taken)
    page = resource.getpagesize()
    return _Memory(int(pages[0]) * page, int(pages[5]) * page, int(pages[1]) * page)


def _machine_memory() -> tuple[int, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return pages, pages
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return found["MemAvailable"], found["MemTotal"]


class ResourceWatch:
    """Admits episodes; shared by all workers of a process. A manager enters before each episode and leaves after it."""

    def __init__(self, limits: ResourceLimits) -> None:
        self._limits = limits
        self._inside: set[Hashable] = set()
        self._waiting: deque[tuple[Hashable, asyncio.Future[None]]] = deque()
        self._cost = EpisodeCost()
        self._before: MachineResources | None = None
        """Without any episode."""
        self._looked = -math.inf
        self._told: int | None = None
        """The ceiling that was told last."""
        self.ceiling = 0
        """Episodes at once until the next look."""
        self._why = ""
        """What is too short for more of them; empty: only that it is not known yet what they take."""
        self._wanted = asyncio.Event()
        """Set while a manager waits."""
        self.shortage: str | None = None
        """What is short now."""

    async def enter(self, who: Hashable) -> None:
        """Returns when an episode may be opened; `who` has one at a time."""
        if time.monotonic() - self._looked > LOOK_AGAIN_SECONDS:
            self.see(look())
        self._inside.discard(who)
        if not self._waiting and self._has_room():
            self._inside.add(who)
            return
        self._tell_ceiling()
        self._wanted.set()
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((who, ticket))
        self._let_in()
        try:
            await ticket
        except asyncio.CancelledError:
            self.leave(who)
            raise

    def leave(self, who: Hashable) -> None:
        self._inside.discard(who)
        self._let_in()

    def may_stay(self, who: Hashable) -> bool:
        """Whether `who` may open its next episode in place of the one that it has: nobody waits, and there is room for as
        many as there are."""
        if time.monotonic() - self._looked > LOOK_AGAIN_SECONDS:
            self.see(look())
        return who in self._inside and not self._waiting and self._has_room(besides=who)

    async def enough(self) -> None:
        """Returns when an episode could be opened."""
        who = object()
        await self.enter(who)
        self.leave(who)

    async def run(self) -> None:
        """Measures every second, and sooner while a manager waits."""
        while True:
            self.see(look())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._wanted.wait()
                    await asyncio.sleep(LOOK_AGAIN_SECONDS)

    def see(self, now: MachineResources) -> None:
        self._looked = time.monotonic()
        if self._before is None or not self._inside:
            self._before = now
        self._cost = self._cost.seen(now, self._before, len(self._inside))
        self.ceiling, self._why = ceiling(now, self._before, self._limits, self._cost, len(self._inside))
        found = shortage(now, self._limits)
        if found is not None and self.shortage is None:
            logger.warning("no further episodes are opened for now: %s", found)
        elif found is None and self.shortage is not None:
            logger.warning("episodes are opened again: there is enough of everything")
        self.shortage = found
        self._let_in()
        if self._waiting:
            self._tell_ceiling()

    @property
    def waits_for(self) -> str:
        """What newcomers wait for; empty: for nothing."""
        if self.shortage is not None:
            return self.shortage
        return f"{self._why}: at most {self.ceiling} episodes at once" if self._waiting and self._why else ""

    def _has_room(self, besides: Hashable | None = None) -> bool:
        """`besides`: one who is inside, and asks for its own place again."""
        inside = len(self._inside) - (besides in self._inside)
        if inside < self._limits.least:
            return True
        return self.shortage is None and inside < self.ceiling

    def _let_in(self) -> None:
        while self._waiting and self._has_room():
            who, ticket = self._waiting.popleft()
            if not ticket.done():  # a cancelled one is dropped here
                self._inside.add(who)
                ticket.set_result(None)
        if not self._waiting:
            self._wanted.clear()

    def _tell_ceiling(self) -> None:
        most = self.ceiling
        if self.shortage is None and self._why and (self._told is None or most < TOLD_AGAIN * self._told):
            self._told = most
            logger.warning("at most %d episodes at once for now: %s", most, self._why)
