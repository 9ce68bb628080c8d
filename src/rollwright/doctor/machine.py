"""Checks of the machine: cores, memory, disk, clock, and what is installed."""

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rollwright.doctor.findings import Finding, must_fix, note, well
from rollwright.hardware import GIB, cpu_only, free_memory, gigabytes, plan_threads
from rollwright.swarm.heartbeat import read_heartbeat, read_status
from rollwright.swarm.refusals import PeerRefusal

LEAST_MEMORY = 2 * GIB
"""Torch, this package and a model of 135 million parameters, played."""

LEAST_DISK, GOOD_DISK = GIB, 5 * GIB
"""For a few checkpoints of a small model; for logs, records and larger ones beside them."""

NEEDED = {
    "torch": "train",
    "transformers": "engines",
    "safetensors": "train",
    "cryptography": "swarm",
    "zenoh": "swarm",
    "reasoning_gym": "reasoning",
}
"""What a node imports, and the extra that brings it."""

FUTURE_SECONDS = 60.0
"""A heartbeat from so far ahead was written before the clock went back."""


def check_machine(home: Path) -> Iterator[Finding]:
    plan = plan_threads()
    yield well(
        "machine", f"Python {sys.version.split()[0]}; {plan.threads} threads for a model: {plan.reason}"
    )
    if cpu_only():
        yield note("machine", "CPU_ONLY is set: no other device is used", "unset CPU_ONLY to use a GPU")
    yield _memory()
    yield from _disk(home)
    missing = {name: extra for name, extra in NEEDED.items() if importlib.util.find_spec(name) is None}
    if missing:
        extras = ",".join(sorted(set(missing.values())))
        yield must_fix(
            "machine", f"not installed: {', '.join(missing)}", f'pip install "rollwright[{extras}]"'
        )
    else:
        yield well("machine", "all packages of a node are installed")


def _memory() -> Finding:
    free = free_memory()
    if free < LEAST_MEMORY:
        return must_fix(
            "memory",
            f"{gigabytes(free)} free, {gigabytes(LEAST_MEMORY)} are the least",
            "end other programs, raise the limit of the container, or play on an engine elsewhere",
        )
    return well("memory", f"{gigabytes(free)} free")


def _disk(home: Path) -> Iterator[Finding]:
    place = home
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK):
        yield must_fix(
            "disk", f"{place} cannot be written to", "choose another folder with --home, or its rights"
        )
        return
    free = shutil.disk_usage(place).free
    if free < LEAST_DISK:
        yield must_fix(
            "disk", f"{gigabytes(free)} free at {place}", "remove old runs, or choose another --home"
        )
    elif free < GOOD_DISK:
        yield note("disk", f"{gigabytes(free)} free at {place}", "enough to start; watch it")
    else:
        yield well("disk", f"{gigabytes(free)} free at {place}")


def check_clock(home: Path) -> Iterator[Finding]:
    """Peers refuse what comes from another time."""
    packaged = max(file.stat().st_mtime for file in Path(__file__).parent.glob("*.py"))
    now = time.time()
    if now < packaged - 86_400:
        yield must_fix("clock", f"it is {time.ctime(now)} here, before this release was installed", _SET)
        return
    beat = read_heartbeat(home)
    if beat is not None and beat.time > now + FUTURE_SECONDS:
        yield must_fix("clock", f"the node's last heartbeat is {beat.time - now:.0f} s in the future", _SET)
        return
    status = read_status(home)
    skewed = 0 if status is None else status.refused.get(PeerRefusal.CLOCK_SKEW, 0)
    if skewed:
        yield note("clock", f"{skewed} groups of peers were refused: their clock or this one is wrong", _SET)
    elif Path("/run/systemd/timesync/synchronized").exists():
        yield well("clock", "kept by a time server")
    else:
        yield note("clock", "whether a time server keeps it cannot be told", "nothing, if `date -u` is right")


_SET = "set it, and keep it with a time server: `timedatectl set-ntp true`"
