"""The ranks of a trainer, and the few numbers that they agree on.

Always true: every decision of a step (skip, out of memory, failure) is taken on reduced values, which are the same on all
ranks, so no rank waits for another that has decided differently. With one rank, nothing is communicated.
"""

import math
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rollwright.errors import RollwrightError
from rollwright.hardware import is_out_of_memory

FINE, OUT_OF_MEMORY, FAILED = 0.0, 1.0, 2.0
"""Outcomes of a part of a step, in the order of precedence."""


class RankFailed(RollwrightError):
    """Another rank raised an error in this step; its own message is in its output."""


class Ranks:
    """This process as one of `size` ranks. Without a process group: the only one."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.waited = 0.0
        """Seconds spent waiting for other ranks, where ranks agree on the outcome of their passes."""

    def sums(self, values: Sequence[float]) -> list[float]:
        """For each value, the sum over all ranks, in 64 bits."""
        return self._reduced(values, "SUM")

    def maxima(self, values: Sequence[float]) -> list[float]:
        """For each value, the maximum over all ranks."""
        return self._reduced(values, "MAX")

    def add_up(self, values: Tensor) -> Tensor:
        """The element-wise sum over all ranks; on the device of `values`."""
        if self.size == 1:
            return values
        import torch.distributed as dist

        on_cpu = values.cpu()
        dist.all_reduce(on_cpu)
        return on_cpu.to(values.device)

    def bytes_of_all(self, own: bytes) -> list[bytes]:
        """What each rank gave, in the order of ranks; all give equally many."""
        if self.size == 1:
            return [own]
        import torch.distributed as dist

        given = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        found = [torch.empty_like(given) for _ in range(self.size)]
        dist.all_gather(found, given)
        return [each.numpy().tobytes() for each in found]

    def from_first(self, tensor: Tensor, value: Tensor | None) -> Tensor:
        """Rank 0's `value`, which the other ranks need not know; of the shape, type and device of `tensor`."""
        whole = (
            torch.empty(tensor.shape, dtype=tensor.dtype) if value is None else value.to(tensor.dtype).cpu()
        )
        if self.size > 1:
            import torch.distributed as dist

            whole = whole.contiguous()
            dist.broadcast(whole, 0)
        return whole.to(tensor.device)

    def agree(self, error: Exception | None) -> None:
        """Raises on every rank if any rank had an error: that error itself, `MemoryError`, or `RankFailed`."""
        own = FINE if error is None else OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
        began = time.perf_counter()
        worst = self.maxima([own])[0]
        self.waited += time.perf_counter() - began
        if error is not None and own == worst:
            raise error
        if worst == OUT_OF_MEMORY:
            raise MemoryError("out of memory on another rank")
        if worst == FAILED:
            raise RankFailed("training: another rank failed in this step; its line is in the log")

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> float:
        """Norm of all gradients, in 64 bits, over all shards; gradients that are whole on every rank count once."""
        squares, whole, group = 0.0, 0.0, None
        for parameter in parameters:
            if parameter.grad is not None:
                local, own = _local(parameter.grad)
                square = float(torch.linalg.vector_norm(local, dtype=torch.float64) ** 2)
                squares, whole = (squares, whole + square) if own is None else (squares + square, whole)
                group = own or group
        if self.size > 1 and group is not None:
            import torch.distributed as dist

            total = torch.tensor([squares], dtype=torch.float64)
            dist.all_reduce(total, group=group)
            squares = float(total)
        return math.sqrt(squares + whole)

    def figures(self, seconds: float) -> dict[str, Any]:
        """Fields of a step's report: share of time in which ranks waited, and the memory of each."""
        if self.size == 1:
            return {}
        own = [0.0] * self.size
        own[self.rank] = _peak_memory_mb()
        waited, *memory = self.sums([self.waited / max(seconds, 1e-9) / self.size, *own])
        return {
            "rank_waiting_share": waited,
            "rank_memory_mb": {rank: round(each, 1) for rank, each in enumerate(memory)},
        }

    def _reduced(self, values: Sequence[float], operation: str) -> list[float]:
        if self.size == 1:
            return list(values)
        import torch.distributed as dist

        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation))
        found: list[float] = tensor.tolist()
        return found


def _peak_memory_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)  # macOS counts bytes, Linux kilobytes


ALONE = Ranks()
"""One process without a process group."""


def _local(gradient: Tensor) -> tuple[Tensor, object]:
    """This rank's part of a gradient, and the group of ranks that hold the other parts; `None` if there are none."""
    mesh = getattr(gradient, "device_mesh", None)
    if mesh is None:
        return gradient, None
    return gradient.to_local(), mesh.get_group(mesh.ndim - 1)  # type: ignore[attr-defined]
