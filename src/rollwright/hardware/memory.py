"""How much memory is available, on the machine and on a device, and whether an error says that it ran out."""

from collections.abc import Callable

from rollwright.hardware.cgroups import Cgroups

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
    return f"{count / GIB:.1f} GiB"
