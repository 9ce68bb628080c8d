"""How long a row may be: the memory of its activations against that of a rank.

Always true: the estimate is a lower bound, counted from what torch keeps for the backward pass of short rows, so no row that
fits is refused. A row goes through one rank as a whole; one that cannot fit is refused before any rank computes, because on a
CPU a lack of memory ends a process without an error.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from rollwright.hardware import free_device_memory

LENGTHS = (16, 32, 48)
"""Of the rows that are tried: equally spaced, so that three of them give a parabola."""


@dataclass(frozen=True)
class RowMemory:
    """Bytes that a row's activations take: proportional to its length, and, of some attention kernels, to its square."""

    per_token: float
    per_pair: float

    @classmethod
    def of(cls, sizes: tuple[float, float, float]) -> "RowMemory":
        """From the bytes of rows of `LENGTHS`; what does not depend on the length is left out."""
        step = LENGTHS[1] - LENGTHS[0]
        per_pair = max(sizes[2] - 2 * sizes[1] + sizes[0], 0.0) / (2 * step**2)
        per_token = (sizes[1] - sizes[0]) / step - per_pair * (LENGTHS[0] + LENGTHS[1])
        return cls(max(per_token, 0.0), per_pair)

    def size(self, tokens: int) -> float:
        return self.per_token * tokens + self.per_pair * tokens**2

    def longest(self, memory: float) -> int:
        """Tokens of the longest row whose activations fit."""
        if not self.per_pair:
            return int(memory / self.per_token) if self.per_token else 1 << 62
        half = self.per_token / (2 * self.per_pair)
        return int(sqrt(half**2 + memory / self.per_pair) - half)


def kept_bytes(run: Any) -> float:
    """Bytes that torch keeps for the backward pass of `run()`; storage that several tensors share counts once."""
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()  # what is kept lives as long as this, so no two of them have the same address
    del result
    return float(sum(found.values()))


def memory_for_rows(device: torch.device) -> int:
    """Bytes that this rank can still take."""
    free = free_device_memory(str(device))
    if device.type != "cuda":
        return free
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
