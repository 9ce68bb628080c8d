"""The number of compute threads: the cores that this process may use, divided by its workers.

Invariants: `OMP_NUM_THREADS` and `MKL_NUM_THREADS` win when the user has set them; the decision is in the environment before
torch loads, for this process and its children; a worker decides anew, because it can tell an inherited decision from the
user's wish, and knows how many workers there are.

Threads wait for each other by sleeping (`OMP_WAIT_POLICY`), not by spinning as is the default: on a busy machine, two
spinning threads on two cores are many times slower than one.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rollwright.hardware.cgroups import Cgroups

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
WAIT_VARIABLE = "OMP_WAIT_POLICY"

DECIDED_VARIABLE = "ROLLWRIGHT_THREADS"
"""Holds the number of threads if this module decided it, not the user."""

WORKERS_VARIABLE = "ROLLWRIGHT_WORKERS"
"""Tells a worker process how many workers share the machine."""

Threads = int | Literal["auto"]


@dataclass(frozen=True)
class Cores:
    """The cores that this process may use."""

    count: int
    reason: str
    """What limits the number."""


@dataclass(frozen=True)
class ThreadPlan:
    """The number of threads for torch."""

    threads: int
    reason: str
    by_user: bool = False
    """Whether the user's variables decided."""


def usable_cores(cgroups: Cgroups | None = None) -> Cores:
    """The smaller of the process's CPU affinity and its control group's quota; at least 1."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = (cgroups or Cgroups()).cores()
    if quota is not None and quota < there:
        return Cores(max(1, int(quota)), f"the group may use {quota:g} of {there} cores")
    return Cores(there, f"{there} of {os.cpu_count() or 1} cores may be used")


def plan_threads(
    wanted: Threads = "auto",
    environment: Mapping[str, str] | None = None,
    cores: Cores | None = None,
) -> ThreadPlan:
    """Decide the number for this process, which may be one of several workers."""
    environment = os.environ if environment is None else environment
    if users := [name for name in THREAD_VARIABLES if _is_users(name, environment)]:
        number = next(int(environment[name].split(",")[0]) for name in users)
        return ThreadPlan(number, f"{users[0]}={environment[users[0]]}", by_user=True)
    if wanted != "auto":
        return ThreadPlan(wanted, "as configured")
    cores = cores or usable_cores()
    told = environment.get(WORKERS_VARIABLE, "")
    workers = max(1, int(told)) if told.isdigit() else 1
    shared = f", shared by {workers} workers" if workers > 1 else ""
    return ThreadPlan(max(1, cores.count // workers), cores.reason + shared)


def claim_threads(wanted: Threads = "auto") -> ThreadPlan:
    """Decide for this process and export the decision. Once torch is loaded it is too late to change how threads wait, so
    `auto` gives one thread then."""
    plan = plan_threads(wanted)
    if "torch" in sys.modules:
        if wanted == "auto" and not plan.by_user and WAIT_VARIABLE not in os.environ:
            return ThreadPlan(1, "torch was loaded before, with threads that spin while they wait")
        return plan
    os.environ.setdefault(WAIT_VARIABLE, "PASSIVE")
    if not plan.by_user:
        for name in (DECIDED_VARIABLE, *THREAD_VARIABLES):
            os.environ[name] = str(plan.threads)
    return plan


def _is_users(name: str, environment: Mapping[str, str]) -> bool:
    value = environment.get(name, "")
    # One number for each level of nesting; the first is the outermost.
    is_number = value.split(",")[0].isdigit()
    return is_number and environment.get(DECIDED_VARIABLE) != value
