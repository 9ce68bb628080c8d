"""The loss of the value head, as in PPO, and how well values explain returns.

Always true: a token's value loss has the coefficient of its policy loss, so micro-batches, ranks and shared prefixes change
neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollwright.errors import RollwrightError
from rollwright.training.micro_batches import MicroBatch, PackedRow
from rollwright.training.settings import CriticSettings


@dataclass(frozen=True)
class ValueLosses:
    """Loss of the value before each trained token."""

    losses: Tensor
    clipped: Tensor
    """Whether the clip set the value's gradient to zero."""


def value_losses(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> ValueLosses:
    """Half the squared error; with `clip`, at least that of the value within `clip` of the old one (PPO)."""
    plain = (values - returns) ** 2
    if clip is None:
        return ValueLosses(0.5 * plain, torch.zeros_like(plain, dtype=torch.bool))
    near = (torch.clamp(values, old - clip, old + clip) - returns) ** 2
    return ValueLosses(0.5 * torch.maximum(plain, near), (near > plain).detach())


@dataclass(frozen=True)
class Critic:
    """The value head's part in one update."""

    settings: CriticSettings
    warming_up: bool = False
    """Whether the head alone is trained."""

    @property
    def reaches_trunk(self) -> bool:
        return self.settings.trunk and not self.warming_up

    def losses(self, values: Tensor, batch: MicroBatch) -> ValueLosses:
        if batch.values is None or batch.returns is None:
            raise RollwrightError(
                "training.critic: rows have no values; build them with `values=trainer.values`"
            )
        return value_losses(values, batch.values, batch.returns, self.settings.clip)

    def total(self, policy: Tensor, value: Tensor) -> Tensor:
        """The loss of both. While the head warms up, the policy's part has gradient 0."""
        return (policy * 0.0 if self.warming_up else policy) + self.settings.coefficient * value


def explained_variance(rows: Sequence[PackedRow]) -> float | None:
    """Share of the variance of returns that the values before the step explain: 1 is perfect, 0 as good as a constant.
    `None` without values, or if all returns are equal."""
    known = [(row.values, row.returns) for row in rows if row.values is not None and row.returns is not None]
    if not known:
        return None
    values, returns = (torch.cat(each).double() for each in zip(*known, strict=True))
    spread = returns.var(correction=0)
    return None if float(spread) == 0 else float(1 - (returns - values).var(correction=0) / spread)
