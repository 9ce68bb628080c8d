"""Control groups of boxes: memory, processes and CPU of everything in a box together.

Always true: a group is named after its box and lies below a group `rollwright`, so that a reaper finds it by the box's id
and touches no other. Both layouts are used, version 1 with a hierarchy for each controller and version 2 with one. Where a
controller cannot be used (no right to write, or version 2 without delegation), `create` leaves it out and says so.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PARENT = "rollwright"
"""Group that holds the groups of all boxes."""

CONTROLLERS = ("memory", "pids", "cpu", "freezer")
_FREEZE_SECONDS = 2.0
_CPU_PERIOD = 100_000
"""Microseconds over which a CPU quota counts; the kernel's default."""

_REMOVE_SECONDS = 3.0
"""Time for the last processes of a group to leave it, after they were killed."""


def group_folders(box_id: str, root: Path = ROOT) -> list[Path]:
    """The existing groups of a box."""
    return [folder for parent in _parents(root) if (folder := parent / box_id).is_dir()]


def all_groups(root: Path = ROOT) -> set[str]:
    """Ids of all boxes that have a group."""
    return {
        each.name
        for parent in _parents(root)
        if parent.is_dir()
        for each in parent.iterdir()
        if each.is_dir()
    }


def create(
    box_id: str, *, memory: int, processes: int, cpus: float, root: Path = ROOT
) -> tuple[list[Path], list[str]]:
    """Creates the groups of a box; returns them and the controllers that are missing."""
    folders: dict[Path, None] = {}
    missing = []
    for controller in CONTROLLERS:
        if controller == "cpu" and not cpus:
            continue
        try:
            folder = _group(controller, box_id, root)
            _limit(folder, controller, memory, processes, cpus)
        except OSError:
            missing.append(controller)
        else:
            folders[folder] = None
    return list(folders), missing


def open_entries(folders: list[Path]) -> list[int]:
    """Files to which a process with one thread writes `0` to enter the groups, for a process that will not see them."""
    return [os.open(_entry(folder), os.O_WRONLY) for folder in folders]


def enter(entries: list[int]) -> None:
    """Moves this process, which must have one thread, and with it the ones it will start, and closes the files."""
    for each in entries:
        os.write(each, b"0")
        os.close(each)


def _entry(folder: Path) -> str:
    # A thread that moves itself needs no lock on all processes, for which the kernel waits some milliseconds. Version 2 has
    # no such file for groups that limit memory.
    tasks = os.path.join(folder, "tasks")
    return tasks if os.path.exists(tasks) else os.path.join(folder, "cgroup.procs")


def freeze(folders: list[Path]) -> bool:
    """Stops the processes of a box until `thaw`; returns whether they stand still."""
    return _set_frozen(folders, True)


def thaw(folders: list[Path]) -> None:
    _set_frozen(folders, False)


def _set_frozen(folders: list[Path], is_frozen: bool) -> bool:
    for folder in folders:
        for name, words, seen, expected in (
            ("freezer.state", ("THAWED", "FROZEN"), "freezer.state", ("THAWED", "FROZEN")),
            ("cgroup.freeze", ("0", "1"), "cgroup.events", ("frozen 0", "frozen 1")),
        ):
            if not (folder / name).exists():
                continue
            (folder / name).write_text(words[is_frozen])
            deadline = time.monotonic() + _FREEZE_SECONDS
            while expected[is_frozen] not in (folder / seen).read_text():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
            return True
    return False


def processes_in(folders: list[Path]) -> set[int]:
    """Processes of a box, by their ids outside it."""
    found: set[int] = set()
    for folder in folders:
        with suppress(OSError):
            found.update(map(int, (folder / "cgroup.procs").read_text().split()))
    return found


def count_oom_kills(folders: list[Path]) -> int:
    """Processes that the kernel killed because the box used all its memory."""
    for folder in folders:
        for name in ("memory.oom_control", "memory.events"):
            with suppress(OSError):
                for line in (folder / name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
    return 0


def memory_used(folders: list[Path]) -> int:
    """Bytes that a box uses now."""
    for folder in folders:
        for name in ("memory.usage_in_bytes", "memory.current"):
            with suppress(OSError, ValueError):
                return int((folder / name).read_text())
    return 0


def remove(box_id: str, root: Path = ROOT) -> bool:
    """Removes the groups of a box whose processes are gone or going; returns whether none is left."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    while folders := group_folders(box_id, root):
        for folder in folders:
            with suppress(OSError):
                folder.rmdir()
        if time.monotonic() > deadline:
            return not group_folders(box_id, root)
        if group_folders(box_id, root):
            time.sleep(0.005)
    return True


def _parents(root: Path) -> Iterator[Path]:
    if (root / "cgroup.controllers").exists():
        yield root / PARENT
    for controller in CONTROLLERS:
        if (root / controller / "cgroup.procs").exists():
            yield root / controller / PARENT


def _group(controller: str, box_id: str, root: Path) -> Path:
    if (root / controller / "cgroup.procs").exists():
        folder = root / controller / PARENT / box_id
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    if controller not in ["freezer", *(root / "cgroup.controllers").read_text().split()]:
        raise OSError(f"no controller {controller}")
    parent = root / PARENT
    parent.mkdir(exist_ok=True)
    for each in (root, parent) if controller != "freezer" else ():  # every group of version 2 can be frozen
        if controller not in (each / "cgroup.subtree_control").read_text().split():
            (each / "cgroup.subtree_control").write_text(f"+{controller}")
    folder = parent / box_id
    folder.mkdir(exist_ok=True)
    return folder


def _limit(folder: Path, controller: str, memory: int, processes: int, cpus: float) -> None:
    first_version = os.path.exists(folder / "memory.limit_in_bytes") or not os.path.exists(
        folder / "cgroup.type"
    )
    if controller == "memory":
        (folder / ("memory.limit_in_bytes" if first_version else "memory.max")).write_text(str(memory))
        swap = folder / ("memory.memsw.limit_in_bytes" if first_version else "memory.swap.max")
        if swap.exists():
            swap.write_text(str(memory) if first_version else "0")
    elif controller == "pids":
        (folder / "pids.max").write_text(str(processes))
    elif controller == "freezer":
        return
    elif first_version:
        (folder / "cpu.cfs_period_us").write_text(str(_CPU_PERIOD))
        (folder / "cpu.cfs_quota_us").write_text(str(int(cpus * _CPU_PERIOD)))
    else:
        (folder / "cpu.max").write_text(f"{int(cpus * _CPU_PERIOD)} {_CPU_PERIOD}")
