"""The device of a model: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`, overridden by `CPU_ONLY`.

Invariant: with `CPU_ONLY` set, or with `cpu`, no other device is touched, not even to see whether it exists.
"""

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollwright.errors import ConfigError

if TYPE_CHECKING:
    import torch

CPU_ONLY_VARIABLE = "CPU_ONLY"

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")

_FALSE = ("", "0", "false", "no", "off")


def cpu_only(environment: Mapping[str, str] | None = None) -> bool:
    """Whether `CPU_ONLY` is set to anything but a no."""
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
            f"device {wanted} is not there; accepted here: {', '.join(['auto', 'cpu', *there])}"
        )
    return named


def pick_device(wanted: str) -> "torch.device":
    import torch

    return torch.device(device_name(wanted))
