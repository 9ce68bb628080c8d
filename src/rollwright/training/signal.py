"""Signal and noise of a gradient, from its two halves.

The groups of a batch are dealt into two halves, whose gradients are independent estimates of the same one: what they have in
common is signal, what they differ in is noise. Always true: the update is the sum of both, so measuring changes nothing but
the order of its sum; no pass through the model is made for it. The parameters are looked at in equal strides, so that the copy
of the first half's gradient stays small for a model of any size.

Both figures are unbiased, and one batch says little: average each over steps before the two are divided.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollwright.training.micro_batches import PackedRow

MOST_ELEMENTS = 1_000_000
"""Elements of the gradient that are looked at: 4 MB, and far more than the halves' angle needs."""


@dataclass(frozen=True)
class GradientSignal:
    """Squared norms, over the elements looked at."""

    signal: float
    """Of the expected gradient; may be negative by chance."""
    noise: float
    """Of the difference of the batch's gradient to it, as expected."""


class SplitHalf:
    """One measurement: the rows of the first half, then its gradient, then that of all rows."""

    def __init__(self, rows: Sequence[PackedRow], parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        elements = sum(each.numel() for each in self._parameters)
        self._stride = -(-elements // MOST_ELEMENTS)
        groups = list(dict.fromkeys(row.group_id for row in rows))
        first = set(groups[::2])
        self.first = {place for place, row in enumerate(rows) if row.group_id in first}
        """Places of the rows of the first half."""
        self._share = len(first) / len(groups)
        self._half: Tensor | None = None

    def note_first(self) -> None:
        """Notes the gradient of the first half."""
        self._half = self._looked_at()

    def finish(self) -> GradientSignal | None:
        """Signal and noise by the gradient of all rows; `None`: the first half was not noted."""
        if self._half is None:
            return None
        share = self._share
        one, other = self._half / share, (self._looked_at() - self._half) / (1 - share)
        difference = one - other
        return GradientSignal(
            signal=float(one @ other), noise=float(difference @ difference) * share * (1 - share)
        )

    def _looked_at(self) -> Tensor:
        found = [
            (torch.zeros_like(each) if each.grad is None else each.grad).detach().flatten()[:: self._stride]
            for each in self._parameters
        ]
        # In double precision: the product of the halves is a small difference of large numbers.
        return torch.cat([each.double().cpu() for each in found])


def split_half(rows: Sequence[PackedRow], parameters: Mapping[str, nn.Parameter]) -> SplitHalf | None:
    """A measurement of the gradient of these rows; `None`: they are of one group, which has no halves."""
    if len({row.group_id for row in rows}) < 2:
        return None
    return SplitHalf(rows, parameters.values())
