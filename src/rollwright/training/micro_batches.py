"""Rows as tensors, in micro-batches of rows with similar length.

Always true: padding is on the right, where a causal model does not attend to it, so no attention mask is needed and the
fast attention kernels apply. Tokens after the last trained token of a row are not computed. Only positions whose next token
is trained reach the output head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollwright.training.rows import NotTrainable, Row
from rollwright.trajectory import MIN_TEMPERATURE, NO_TEMPERATURE, TokenIds

STARTING_COSTS = 64
"""Overhead of one more micro-batch, in padded tokens: on a CPU core, 50 were measured with 0.8 M parameters and 125 with
0.1 M."""


_LOWEST_TEMPERATURE = MIN_TEMPERATURE * (1 - 1e-6)
"""Temperatures are stored as 32-bit floats, in which the lowest one is slightly smaller."""


@dataclass(frozen=True)
class PackedRow:
    """A row as tensors: the input ids and, for each trained token, the inputs of the loss."""

    rollout_id: str
    inputs: Tensor
    """Ids before the last trained token."""
    places: Tensor
    """Positions of the inputs that predict the trained tokens."""
    targets: Tensor
    engine: Tensor
    """Log-probabilities of the engine that sampled."""
    advantages: Tensor
    weights: Tensor
    versions: Tensor
    temperatures: Tensor

    @property
    def length(self) -> int:
        return len(self.inputs)


def pack(row: Row, temperature: float = 1.0) -> PackedRow:
    """Converts a row. `temperature`: for tokens without a recorded one. Raises `NotTrainable` if one is too low."""
    trained = torch.frombuffer(bytearray(row.mask), dtype=torch.uint8).nonzero().squeeze(1)
    ids = torch.frombuffer(row.token_ids, dtype=torch.int32).long()
    return PackedRow(
        rollout_id=row.rollout_id,
        inputs=ids[: int(trained[-1])],
        places=trained - 1,
        targets=ids[trained],
        engine=torch.frombuffer(row.logprobs, dtype=torch.float32)[trained],
        advantages=torch.frombuffer(row.advantages, dtype=torch.float32)[trained],
        weights=torch.frombuffer(row.weights, dtype=torch.float32)[trained],
        versions=torch.frombuffer(row.versions, dtype=torch.int32)[trained],
        temperatures=_temperatures(row, trained, temperature),
    )


def _temperatures(row: Row, trained: Tensor, own: float) -> Tensor:
    if row.temperatures is None:
        return torch.full((len(trained),), own)
    told = torch.frombuffer(row.temperatures, dtype=torch.float32)[trained]
    found = torch.where(told == NO_TEMPERATURE, own, told)
    if not bool((found >= _LOWEST_TEMPERATURE).all() & found.isfinite().all()):
        wrong = found[~((found >= _LOWEST_TEMPERATURE) & found.isfinite())][0].item()
        raise NotTrainable(
            f"rollout {row.rollout_id} is not trainable: it was sampled at temperature {wrong:g}; accepted: "
            f"{MIN_TEMPERATURE:g} or more"
        )
    return found


def scoring_row(prompt: TokenIds, sampled: TokenIds, temperature: float) -> PackedRow:
    """A prompt and the ids that follow it, to be scored and not trained on."""
    ids = torch.frombuffer(prompt + sampled, dtype=torch.int32).long()
    nothing = torch.zeros(len(sampled))
    return PackedRow(
        rollout_id="",
        inputs=ids[:-1],
        places=torch.arange(len(prompt) - 1, len(ids) - 1),
        targets=ids[len(prompt) :],
        engine=nothing,
        advantages=nothing,
        weights=nothing,
        versions=torch.zeros(len(sampled), dtype=torch.int32),
        temperatures=torch.full((len(sampled),), temperature),
    )


def plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Partitions rows into micro-batches, longest first, with the least padding, `STARTING_COSTS` included.

    A micro-batch has at most `budget` tokens with padding, unless a single row is longer. Rows of equal length keep their
    order, so the plan is deterministic.
    """
    # Dynamic programming over the rows sorted by length: the best partition from each start to the end.
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    costs = [0] * (len(order) + 1)
    """Cost of the best partition of all rows from each position on."""
    ends = [0] * len(order)
    for start in reversed(range(len(order))):
        longest = lengths[order[start]]
        last = min(start + max(budget // longest, 1), len(order))
        costs[start], ends[start] = min(
            (longest * (end - start) + STARTING_COSTS + costs[end], end) for end in range(start + 1, last + 1)
        )
    found, start = [], 0
    while start < len(order):
        found.append(order[start : ends[start]])
        start = ends[start]
    return found


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together; the trained tokens of all rows are concatenated."""

    rows: Sequence[int]
    """Indices of these rows in the batch."""
    inputs: Tensor
    """Shape: rows × longest row."""
    places: Tensor
    """Positions of the predecessors of trained tokens in the flattened `inputs`."""
    targets: Tensor
    engine: Tensor
    advantages: Tensor
    temperatures: Tensor | float = 1.0
    """A number if it is the same for all tokens, which is cheaper."""

    @property
    def tokens(self) -> int:
        """Number of tokens with padding."""
        return self.inputs.numel()


def collate(packed: Sequence[PackedRow], rows: Sequence[int], device: torch.device) -> MicroBatch:
    chosen = [packed[row] for row in rows]
    width = max(row.length for row in chosen)
    inputs = torch.zeros(len(chosen), width, dtype=torch.long)
    for place, row in enumerate(chosen):
        inputs[place, : row.length] = row.inputs
    temperatures = torch.cat([row.temperatures for row in chosen])
    first = float(temperatures[0])
    places = [row.places + width * place for place, row in enumerate(chosen)]
    return MicroBatch(
        rows=rows,
        inputs=inputs.to(device),
        places=torch.cat(places).to(device),
        targets=torch.cat([row.targets for row in chosen]).to(device),
        engine=torch.cat([row.engine for row in chosen]).to(device),
        advantages=torch.cat([row.advantages for row in chosen]).to(device),
        temperatures=first if bool((temperatures == first).all()) else temperatures.to(device),
    )
