"""In which precision a trainer can compute on a device."""

import subprocess
import sys
from functools import cache

import torch

from rollwright.errors import ConfigError

_MULTIPLY = """
import torch
with torch.autocast("cpu", torch.bfloat16):
    torch.nn.Linear(32, 32)(torch.ones(8, 32)).float().sum().backward()
"""


def check_bfloat16(device: torch.device) -> None:
    """Refuses bfloat16 where it would end the process.

    Some virtual machines announce matrix instructions (AMX) that they do not run. torch then believes the
    announcement, and the first product is an illegal instruction, which no `except` catches.
    """
    if device.type == "cpu" and not bfloat16_works_on_cpu():
        raise ConfigError(
            "trainer settings: dtype bfloat16 does not work on this CPU (illegal instruction); "
            "use float32, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before the start"
        )


@cache
def bfloat16_works_on_cpu() -> bool:
    """Tried once, in a process of its own."""
    return subprocess.run([sys.executable, "-c", _MULTIPLY], capture_output=True, check=False).returncode == 0
