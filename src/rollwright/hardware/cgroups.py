"""Limits of Linux control groups, which containers and service managers set.

A limit holds for everything below it, so the tightest on the way up counts. Both layouts are read: version 2 with one
hierarchy, version 1 with one for each controller. `psutil` does not know these limits.
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

_NO_LIMIT = 1 << 60
"""Version 1 writes a number near 2**63 for "no limit"."""


class Cgroups:
    """Reads the current limits of this process."""

    def __init__(self, root: Path = ROOT, membership: Path = MEMBERSHIP) -> None:
        self._root = root
        self._membership = membership

    def cores(self) -> float | None:
        """The CPU quota in cores; `None`: no limit."""
        found = [
            int(quota) / int(period)
            for folder in self._folders("")
            for quota, period in [_words(folder / "cpu.max", 2)]
            if quota.isdigit() and period.isdigit()
        ]
        for folder in self._folders("cpu"):
            quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
            if quota is not None and quota > 0 and period:
                found.append(quota / period)
        return min(found, default=None)

    def free_memory(self) -> int | None:
        """Bytes that may still be allocated; reclaimable page cache counts as free. `None`: no limit."""
        found = []
        for folder in self._folders(""):
            limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
            if limit is not None and used is not None:
                found.append(limit - used + _statistic(folder, "inactive_file"))
        for folder in self._folders("memory"):
            limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
            if limit is not None and limit < _NO_LIMIT and used is not None:
                found.append(limit - used + _statistic(folder, "total_inactive_file"))
        return max(0, min(found)) if found else None

    def _folders(self, controller: str) -> Iterator[Path]:
        """This process's group of a controller and its ancestors; `""` is the hierarchy of version 2."""
        path = self._path(controller)
        if path is None:
            return
        bases = [self._root / controller] if controller else [self._root, self._root / "unified"]
        for base in (each for each in bases if each.is_dir()):
            # inside a container the path may be the host's, and only the root is visible
            place = base / path.lstrip("/")
            while place != base:
                if place.is_dir():
                    yield place
                place = place.parent
            yield base

    def _path(self, controller: str) -> str | None:
        try:
            lines = self._membership.read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(",") and ".." not in path:
                return path
        return None


def _words(file: Path, count: int) -> list[str]:
    try:
        found = file.read_text(encoding="utf-8").split()
    except OSError:
        found = []
    return found if len(found) == count else [""] * count


def _number(file: Path) -> int | None:
    word = _words(file, 1)[0]
    return int(word) if word.lstrip("-").isdigit() else None


def _statistic(folder: Path, name: str) -> int:
    try:
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
