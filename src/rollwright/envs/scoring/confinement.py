"""Locks the current process in, before it runs code that came with an answer.

After `confine` the process can compute, read files and write to what it has open. Where the kernel allows
it (Linux on x86-64 and ARM64) a system-call filter lets nothing else through: no new file, process, signal
or connection. Elsewhere what remains are the resource limits, the user `nobody` when started as root, and
an empty network. A refused call fails with "operation not permitted"; it does not end the process.
"""

import math
import os
import resource
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rollwright.sandbox import kernel
from rollwright.sandbox.calls import READING, program
from rollwright.sandbox.limits import address_space, lower

_MAX_OPEN_FILES = 64
"""Enough to import a module that a scorer loads late."""


def confine(memory: int, cpu_seconds: float) -> None:
    """For good: `memory` bytes and about `cpu_seconds` more than now, and nothing that reaches outside."""
    _limit(memory, cpu_seconds)
    if os.geteuid() == 0 and _readable_by_all(sys.path):
        kernel.become_nobody()
    if sys.platform == "linux":
        with suppress(OSError):  # best effort: a kernel without it leaves the other measures in place
            kernel.die_with_parent()  # a change of user would take this back
        filter_program = program(READING)
        with suppress(OSError):
            if filter_program is not None:
                kernel.filter_calls(filter_program)


def leave_network() -> None:
    """Gives this process and its children a network with nothing in it, where the kernel allows that."""
    if sys.platform == "linux":
        spaces = kernel.NEW_NETWORK if os.geteuid() == 0 else kernel.NEW_NETWORK | kernel.NEW_USER
        with suppress(OSError):
            kernel.unshare(spaces)


def _limit(memory: int, cpu_seconds: float) -> None:
    lower(
        {
            resource.RLIMIT_CPU: math.ceil(time.process_time() + cpu_seconds) + 1,
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NPROC: 0,
            resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
            **address_space(memory),
        }
    )


def _readable_by_all(places: Iterable[str]) -> bool:
    """Whether `nobody` could still import from there: every folder on the way is open to others."""
    resolved = (Path(place).resolve() for place in places if place)
    folders = {folder for place in resolved if place.is_dir() for folder in (place, *place.parents)}
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in folders)
