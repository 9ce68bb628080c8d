"""All trained tokens of one update, without gradient, and sums over the rollouts they belong to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from rollwright.training.micro_batches import PackedRow

Prepared: TypeAlias = Mapping[str, Tensor]
"""By name, one number for each token."""


@dataclass(frozen=True)
class UpdateTokens:
    """The tokens of all rows of an update, row after row; all tensors have one element per token."""

    new: Tensor
    """Log-probabilities of the current weights."""
    old: Tensor
    """Those that the ratio of the loss refers to."""
    before: Tensor
    """Those of the model before the step."""
    engine: Tensor
    advantages: Tensor
    weights: Tensor
    """Weight of each token's turn in its tree; 1 in chains."""
    rollouts: Tensor
    """Index of each token's rollout, from 0."""
    seed: int = 0
    """For losses that choose tokens at random; another one in each update."""

    def rollout_sum(self, values: Tensor) -> Tensor:
        """For each token, the weighted sum over its rollout: in a tree, the mean over the paths of each path's sum."""
        sums = torch.zeros(int(self.rollouts.max()) + 1, dtype=torch.float64, device=values.device)
        sums.index_add_(0, self.rollouts, (self.weights * values).double())
        return sums[self.rollouts].to(values.dtype)

    def rollout_mean(self, values: Tensor) -> Tensor:
        """For each token, the weighted mean over its rollout."""
        return self.rollout_sum(values) / self.rollout_sum(torch.ones_like(values))

    def mean(self, values: Tensor) -> Tensor:
        """Weighted mean over all tokens."""
        return (self.weights * values).sum() / self.weights.sum()


def rollout_indices(rows: Sequence[PackedRow]) -> Tensor:
    """For each trained token of the rows, the index of its rollout."""
    numbers = {name: place for place, name in enumerate(dict.fromkeys(row.rollout_id for row in rows))}
    return torch.repeat_interleave(
        torch.tensor([numbers[row.rollout_id] for row in rows]),
        torch.tensor([len(row.targets) for row in rows]),
    )
