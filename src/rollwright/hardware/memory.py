"""How much memory can still be taken, on the machine and on a device, and whether an error says that it ran out."""

from pathlib import Path

from rollwright.hardware.cgroups import Cgroups

GIB = 1 << 30

_ALLOCATION_FAILED = ("can't allocate memory", "out of memory", "not enough memory")
"""What torch's allocators say; on a CPU it is a plain RuntimeError."""


def free_memory(cgroups: Cgroups | None = None, table: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes of main memory: what the machine has and what this process's group allows. `None`: it cannot be told."""
    found = [each for each in (_available(table), (cgroups or Cgroups()).free_memory()) if each is not None]
    return min(found, default=None)


def free_device_memory(device: str) -> int | None:
    """Bytes on a device as torch names it; of the CPU, main memory. `None`: it cannot be told."""
    if not device.startswith("cuda"):
        return free_memory()
    import torch

    free, _ = torch.cuda.mem_get_info(torch.device(device))
    return int(free)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this, or what caused it, is a lack of memory."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    said = isinstance(error, RuntimeError) and any(each in str(error).lower() for each in _ALLOCATION_FAILED)
    cause = error.__cause__
    return known or said or (cause is not None and is_out_of_memory(cause))


def gigabytes(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def _available(table: Path) -> int | None:
    try:
        lines = table.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
