"""What a run's trees came to, over all its training rollouts. Pure."""

from collections import Counter
from dataclasses import dataclass, field

from rollwright.trajectory import Trajectory

PREFIX = "tree_"
"""How the metrics that a tree leaves in its trajectory begin."""


@dataclass
class TreeSums:
    sums: Counter[str] = field(default_factory=Counter)
    """By metric, without its prefix; empty where no tree was played."""

    def add(self, trajectory: Trajectory) -> None:
        for name, value in trajectory.metrics.items():
            if name.startswith(PREFIX):
                self.sums[name.removeprefix(PREFIX)] += int(value)

    def row(self) -> dict[str, int]:
        return dict(self.sums)
