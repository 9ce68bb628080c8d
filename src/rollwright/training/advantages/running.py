"""The running value of each tag: a baseline that earlier batches give, for groups too small to be compared with themselves.

Always true: a value is computed from batches before the one that it is used for, so it does not depend on any decision of
that batch, and a baseline that contains it is unbiased. The state is plain numbers; restored from a checkpoint and shown
the batches since then, it is the same to the last bit.
"""

import math
from collections.abc import Mapping
from typing import Any

from rollwright.errors import ConfigError
from rollwright.training.advantages.base import Groups, admitted


class RunningValues:
    """Mean reward of the groups of each tag, in which older groups count less. A tag contains its level (`TAG@LEVEL`)."""

    def __init__(self, decay: float) -> None:
        """`decay`: factor by which the weight of all earlier groups falls with each group."""
        self._decay = decay
        self._sums: dict[str, tuple[float, float]] = {}
        """Weighted sum of the groups' means and sum of the weights, by tag."""

    def value(self, tag: str) -> float | None:
        """`None` before the first group of the tag."""
        total, weight = self._sums.get(tag, (0.0, 0.0))
        return total / weight if weight else None

    def observe(self, groups: Groups) -> None:
        for group, kept in zip(groups, admitted(groups), strict=True):
            members = [each for each, counts in zip(group, kept, strict=True) if counts]
            if members:
                mean = math.fsum(each.reward for each in members) / len(members)
                total, weight = self._sums.get(members[0].tag, (0.0, 0.0))
                self._sums[members[0].tag] = (self._decay * total + mean, self._decay * weight + 1.0)

    def state(self) -> dict[str, Any]:
        return {tag: list(sums) for tag, sums in self._sums.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._sums = {tag: (float(total), float(weight)) for tag, (total, weight) in state.items()}


class ShrunkBaseline:
    """Base of advantages whose baseline is shrunk towards a prior: fields `kappa` and `decay`, and the running values."""

    kappa: float
    decay: float
    _running: RunningValues

    def __post_init__(self) -> None:
        if not 0 <= self.kappa < math.inf:
            raise ConfigError(f"kappa: is {self.kappa:g}; accepted: 0 or more")
        if not 0 <= self.decay < 1:
            raise ConfigError(f"decay: is {self.decay:g}; accepted: 0 or more, and less than 1")
        object.__setattr__(self, "_running", RunningValues(self.decay))

    def prior(self, tag: str) -> float | None:
        """The running value of the tag; `None` before the first batch, and without shrinkage."""
        return self._running.value(tag) if self.kappa else None

    def observe(self, groups: Groups) -> None:
        if self.kappa:
            self._running.observe(groups)

    def state(self) -> dict[str, Any]:
        return self._running.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._running.restore(state)
