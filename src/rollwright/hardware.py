"""The cores, threads, memory and devices that this process may use.

Always true:
- **Limits.** Containers and service managers limit a process by Linux control groups. A limit holds for the whole subtree,
  so the tightest one on the path to the root counts. Both layouts are read (version 2 with one hierarchy, version 1 with
  one for each controller), because `psutil` does not know these limits.
- **Threads.** `OMP_NUM_THREADS` and `MKL_NUM_THREADS` win when the user has set them. The decision is in the environment
  before torch loads, for this process and its children. A worker decides again: it can tell an inherited decision from the
  user's, and it knows the number of workers. Threads wait for each other by sleeping (`OMP_WAIT_POLICY`), because on a busy
  machine two threads that spin on two cores are many times slower than one.
- **Speed.** Whether bfloat16 pays, how many threads help and from which batch on a model's products run at full speed is
  measured, not guessed: in a process of its own, because some virtual machines advertise instructions that kill it; once
  for each machine, because the result is on file (`rollwright doctor` measures again). Data types and batches are
  compared in CPU seconds, which other programs do not change; threads by the clock, and where other programs had the cores,
  one thread is chosen.
- **Devices.** With `CPU_ONLY` set, or with `cpu`, no other device is touched, not even to see whether it exists.

Importing this module imports neither torch nor psutil: the command line imports it before it decides on threads.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rollwright.cache import cache_folder
from rollwright.errors import ConfigError

if TYPE_CHECKING:
    import torch

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
            # Inside a container the path may be the host's, and only the root is visible.
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


THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
WAIT_VARIABLE = "OMP_WAIT_POLICY"

DECIDED_VARIABLE = "ROLLWRIGHT_THREADS"
"""Holds the number of threads if this module decided it, not the user."""

WORKERS_VARIABLE = "ROLLWRIGHT_WORKERS"
"""Tells a worker process how many workers share the machine."""

Threads = int | Literal["auto"]
"""A number of threads, or `auto`: the usable cores divided by the workers."""


@dataclass(frozen=True)
class Cores:
    """The cores that this process may use."""

    count: int
    reason: str
    """The limit that decided the number."""


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
    speed: "MachineSpeed | None" = None,
) -> ThreadPlan:
    """Decide the number for this process, which may be one of several workers. `speed`: what was measured, if anything; of
    more threads than helped then, none are taken."""
    environment = os.environ if environment is None else environment
    if users := [name for name in THREAD_VARIABLES if _is_set_by_user(name, environment)]:
        number = next(int(environment[name].split(",")[0]) for name in users)
        return ThreadPlan(number, f"{users[0]}={environment[users[0]]}", by_user=True)
    if wanted != "auto":
        return ThreadPlan(wanted, "as configured")
    cores = cores or usable_cores()
    given = environment.get(WORKERS_VARIABLE, "")
    workers = max(1, int(given)) if given.isdigit() else 1
    shared = f", shared by {workers} workers" if workers > 1 else ""
    share = max(1, cores.count // workers)
    if speed is not None and speed.threads < share:
        return ThreadPlan(speed.threads, f"more were no faster when measured; {cores.reason}{shared}")
    return ThreadPlan(share, cores.reason + shared)


def claim_threads(wanted: Threads = "auto") -> ThreadPlan:
    """Decide for this process and export the decision. After torch is loaded it is too late to change how threads wait, so
    `auto` gives one thread then."""
    plan = plan_threads(wanted, speed=speed_on_file())
    if "torch" in sys.modules:
        if wanted == "auto" and not plan.by_user and WAIT_VARIABLE not in os.environ:
            return ThreadPlan(1, "torch was loaded before, with threads that spin while they wait")
        return plan
    os.environ.setdefault(WAIT_VARIABLE, "PASSIVE")
    if not plan.by_user:
        for name in (DECIDED_VARIABLE, *THREAD_VARIABLES):
            os.environ[name] = str(plan.threads)
    return plan


def _is_set_by_user(name: str, environment: Mapping[str, str]) -> bool:
    value = environment.get(name, "")
    # OMP_NUM_THREADS may list one number for each nesting level; the first is the outermost.
    is_number = value.split(",")[0].isdigit()
    return is_number and environment.get(DECIDED_VARIABLE) != value


_MEASURE = """
import json, os, sys, time
load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
import torch

ROWS, WIDTH, OUT = 256, 576, 1536
limit = float(sys.argv[2])
weights = {name: torch.randn(WIDTH, OUT, dtype=getattr(torch, name)) for name in json.loads(sys.argv[3])}

def rate(name, rows, clock):
    given = torch.randn(rows, WIDTH, dtype=getattr(torch, name))
    began, done = clock(), 0
    while done < 3 or clock() - began < limit:
        given @ weights[name]
        done += 1
    return done * rows / max(clock() - began, 1e-9)

def best(rounds, kinds):
    found = {}
    for _ in range(rounds):
        for kind, call in kinds.items():
            found[kind] = max(found.get(kind, 0.0), call())
    return found

torch.set_num_threads(1)
kinds = best(3, {name: (lambda name=name: rate(name, ROWS, time.process_time)) for name in weights})
batches = best(3, {rows: (lambda rows=rows: rate("float32", rows, time.process_time)) for rows in (8, 16, 32, 64, 128, 256)})
threads = {}
for count in {1, int(sys.argv[1])}:
    torch.set_num_threads(count)
    threads[count] = best(3, {count: lambda: rate("float32", ROWS, time.monotonic)})[count]
print(json.dumps({"rates": kinds, "batches": batches, "threads": threads, "load": load}))
"""
"""Multiplies matrices of a small language model's size; prints rows a second by data type, batch and number of threads."""

MEASURED_SECONDS = 0.02
"""Seconds of one product's round; all rounds together take about half a second of CPU time."""

PAYS = 1.1
"""Factor from which on another data type or more threads count as faster: less is noise, and float32 is exact."""

FULL_SPEED = 0.9
"""Share of the best rate at which a batch counts as large enough."""

_MEASURE_TIMEOUT = 60.0
"""Seconds for torch to load and the rounds to end on a busy machine."""


@dataclass(frozen=True)
class MachineSpeed:
    """What was measured on this machine's processor."""

    rates: Mapping[str, float]
    """Rows a CPU second by data type; without `bfloat16` where it does not work."""
    batches: Mapping[int, float]
    """Rows a CPU second by rows at a time."""
    by_threads: Mapping[int, float]
    """Rows a second by number of threads."""
    load: float = 0.0
    """Programs that were running when it was measured, over the last minute."""

    @property
    def dtype(self) -> str:
        """`bfloat16` only where it is faster."""
        faster = self.rates.get("bfloat16", 0.0) >= PAYS * self.rates["float32"]
        return "bfloat16" if faster else "float32"

    @property
    def threads(self) -> int:
        """The most threads that were faster than one. 1 where other programs had half of the cores: more threads get a larger
        share of them then, and wait for each other."""
        most = max(self.by_threads)
        if self.load > most / 2:
            return 1
        return most if self.by_threads[most] >= PAYS * self.by_threads[1] else 1

    @property
    def batch(self) -> int:
        """The smallest batch that runs at nearly full speed."""
        full = FULL_SPEED * max(self.batches.values())
        return min(rows for rows, rate in self.batches.items() if rate >= full)


def measured_speed(*, again: bool = False) -> MachineSpeed:
    """The speed of this machine, measured if it is not on file, or `again`. Raises a `ConfigError` where torch does not run."""
    found = None if again else speed_on_file()
    if found is None:
        told = _measure(("float32", "bfloat16")) or _measure(("float32",))
        if told is None:
            raise ConfigError(
                "the machine's speed cannot be measured: torch does not run; install rollwright[train]"
            )
        file = _speed_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(told, encoding="utf-8")
        found = _read_speed(told)
    return found


def speed_on_file() -> MachineSpeed | None:
    """What was measured on this machine before; `None`: nothing."""
    try:
        return _read_speed(_speed_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError):
        return None


def choose_dtype(wanted: str) -> str:
    """`auto` becomes the data type that is faster here: of a CUDA device bfloat16, of the processor as measured. Anything else
    stays."""
    if wanted != "auto":
        return wanted
    if not cpu_only() and device_name("auto").startswith("cuda"):
        return "bfloat16"
    return measured_speed().dtype


def choose_batch(wanted: int | str) -> int:
    """`auto` becomes the smallest batch that runs at nearly full speed here. A number stays."""
    return wanted if isinstance(wanted, int) else measured_speed().batch


def _measure(dtypes: tuple[str, ...]) -> str | None:
    import subprocess  # here, because the command line imports this module at every start

    command = (str(usable_cores().count), str(MEASURED_SECONDS), json.dumps(dtypes))
    environment = {**os.environ, WAIT_VARIABLE: "PASSIVE"}
    for name in THREAD_VARIABLES:
        environment.pop(name, None)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, *command],
            capture_output=True,
            check=False,
            text=True,
            timeout=_MEASURE_TIMEOUT,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def _read_speed(told: str) -> MachineSpeed:
    read = json.loads(told)
    batches, threads = (
        {int(key): float(value) for key, value in read[name].items()} for name in ("batches", "threads")
    )
    return MachineSpeed(read["rates"], batches, threads, float(read["load"]))


def _speed_file() -> Path:
    """One for each machine and number of usable cores, so that a shared home folder is no trouble."""
    machine = (*os.uname()[1:], str(usable_cores().count)) if hasattr(os, "uname") else (os.name,)
    return cache_folder() / f"speed-{blake2b(repr(machine).encode(), digest_size=6).hexdigest()}.json"


GIB = 1 << 30

_ALLOCATION_FAILED = ("can't allocate memory", "out of memory", "not enough memory")
"""Messages of torch's allocators; on a CPU the error is a plain RuntimeError."""


def available_memory() -> int:
    """Bytes of main memory that can be allocated without swapping, container limits aside."""
    import psutil

    return int(psutil.virtual_memory().available)


def free_memory(cgroups: Cgroups | None = None, available: Callable[[], int] = available_memory) -> int:
    """Bytes of main memory: the smaller of what the machine has and what this process's cgroup allows."""
    limit = (cgroups or Cgroups()).free_memory()
    return available() if limit is None else min(available(), limit)


def free_device_memory(device: str) -> int:
    """Bytes on a device as torch names it; for the CPU, main memory."""
    if not device.startswith("cuda"):
        return free_memory()
    import torch

    free, _ = torch.cuda.mem_get_info(torch.device(device))
    return int(free)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error, or its cause, is a lack of memory."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    said = isinstance(error, RuntimeError) and any(each in str(error).lower() for each in _ALLOCATION_FAILED)
    cause = error.__cause__
    return known or said or (cause is not None and is_out_of_memory(cause))


def gigabytes(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / GIB:.1f} GiB"


CPU_ONLY_VARIABLE = "CPU_ONLY"

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")

_FALSE = ("", "0", "false", "no", "off")


def cpu_only(environment: Mapping[str, str] | None = None) -> bool:
    """Whether `CPU_ONLY` is set to anything but a negative value such as `0` or `false`."""
    environment = os.environ if environment is None else environment
    return environment.get(CPU_ONLY_VARIABLE, "").strip().lower() not in _FALSE


def device_name(wanted: str) -> str:
    """Resolve `wanted` to a device of this machine, by torch's name."""
    if not _DEVICE.fullmatch(wanted):
        raise ConfigError(f"device: {wanted!r} is unknown; accepted: auto, cpu, cuda, cuda:N, mps")
    if wanted == "cpu" or cpu_only():
        return "cpu"
    import torch

    there = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    there += ["mps"] if torch.backends.mps.is_available() else []
    if wanted == "auto":
        return there[0] if there else "cpu"
    named = "cuda:0" if wanted == "cuda" else wanted
    if named not in there:
        raise ConfigError(
            f"device {wanted} does not exist here; accepted: {', '.join(['auto', 'cpu', *there])}"
        )
    return named


def pick_device(wanted: str) -> "torch.device":
    """Resolve `wanted` to a torch device of this machine."""
    import torch

    return torch.device(device_name(wanted))
