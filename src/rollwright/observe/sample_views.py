"""What a trainer would get of a run, as either view: the price of one row for each turn. Pure.

What a run's trees came to, over all its training rollouts. Pure.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from rollwright.trajectory import Trajectory


@dataclass
class ViewSize:
    """The rows of one view, before filters take any out."""

    rows: int = 0
    tokens: int = 0
    """In all rows, prompts included: what a trainer computes."""
    longest: int = 0
    """Tokens of the longest row: what has to fit into memory."""

    def add(self, length: int) -> None:
        self.rows += 1
        self.tokens += length
        self.longest = max(self.longest, length)


@dataclass
class ViewSizes:
    """Both views of the same trajectories."""

    paths: ViewSize = field(default_factory=ViewSize)
    """One row for each token sequence."""
    turns: ViewSize = field(default_factory=ViewSize)
    """One row for each turn, with its whole prompt."""

    def add(self, trajectory: Trajectory) -> None:
        """Counts what could be trained on: nothing of a trajectory that may not be."""
        if trajectory.not_trainable is not None:
            return
        continued = {turn.extends for turn in trajectory.turns}
        lengths: list[int] = []
        for turn in trajectory.turns:
            before = 0 if turn.extends is None else lengths[turn.extends]
            lengths.append(before + len(turn.prompt_ids) + len(turn.sampled_ids))
            self.turns.add(lengths[-1])
            if turn.id not in continued:
                self.paths.add(lengths[-1])

    def row(self) -> dict[str, Any]:
        return asdict(self)


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
