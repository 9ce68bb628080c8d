"""Advantages that take every path of a tree for an episode of its own, as the literature does; for comparison.

There, a turn that several paths share stands in a row of each of them. Here it stands in one row, with the advantage
that makes weight times advantage what those rows give together. All paths of a group count the same, so a decision
that was branched more below weighs more: with branching that depends on the state this is biased (`docs/trees.md`).
A group of chains gives exactly GRPO.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollwright.training.advantages.base import (
    Groups,
    TurnAdvantages,
    admitted,
    centred,
    nothing,
    with_penalties,
)
from rollwright.training.advantages.tree import turn_values
from rollwright.trajectory import Trajectory, leaves, path, turn_weights


@dataclass(frozen=True)
class PathGRPO:
    """A path's reward minus the mean over all paths of the group, over their standard deviation."""

    std: bool = True
    """False: the difference alone."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        return _by_paths(groups, lambda trees: _among_all(trees, self.std))


@dataclass(frozen=True)
class TreeGRPO:
    """A path's advantage among all paths of the group, plus the one among the paths of its own rollout (Tree-GRPO's
    inter- and intra-tree terms). The second trains no turn that all paths of the rollout share."""

    std: bool = True
    """False: the differences alone."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        return _by_paths(groups, self._compared)

    def _compared(self, trees: "Sequence[_Paths]") -> list[list[float]]:
        within = [centred(tree.rewards, tree.counts, std=self.std) for tree in trees]
        return [
            [inter + intra for inter, intra in zip(among, own, strict=True)]
            for among, own in zip(_among_all(trees, self.std), within, strict=True)
        ]


class _Paths(NamedTuple):
    """All paths of one rollout."""

    ends: list[int]
    rewards: list[float]
    counts: list[int]
    """How many paths that came out the same each stands for."""


def _paths(trajectory: Trajectory) -> _Paths:
    values, ends = turn_values(trajectory), leaves(trajectory.turns)
    counts = []
    for end in ends:
        count = 1
        for turn in path(trajectory.turns, end):
            count *= turn.count
        counts.append(count)
    return _Paths(ends, [values[end] for end in ends], counts)


def _among_all(trees: Sequence[_Paths], std: bool) -> list[list[float]]:
    rewards = [reward for tree in trees for reward in tree.rewards]
    compared = iter(centred(rewards, [count for tree in trees for count in tree.counts], std=std))
    return [[next(compared) for _ in tree.ends] for tree in trees]


def _by_paths(groups: Groups, compare: Callable[[Sequence[_Paths]], list[list[float]]]) -> TurnAdvantages:
    found = []
    for group, kept in zip(groups, admitted(groups), strict=True):
        trees = [_paths(trajectory) for trajectory, counts in zip(group, kept, strict=True) if counts]
        share = len(trees) / max(sum(sum(tree.counts) for tree in trees), 1)
        left = iter(zip(trees, compare(trees), strict=True))
        found.append(
            [
                with_penalties(trajectory, _spread(trajectory, *next(left), share))
                if counts
                else nothing(trajectory)
                for trajectory, counts in zip(group, kept, strict=True)
            ]
        )
    return found


def _spread(trajectory: Trajectory, tree: _Paths, advantages: Sequence[float], share: float) -> list[float]:
    """What the paths through each turn get together. `share`: what one path weighs, of a rollout's weight of 1."""
    sums = [0.0] * len(trajectory.turns)
    for end, count, advantage in zip(tree.ends, tree.counts, advantages, strict=True):
        sums[end] = count * advantage
    for turn in reversed(trajectory.turns):
        if turn.after is not None:
            sums[turn.after] += sums[turn.id]
    return [
        share * total / weight for total, weight in zip(sums, turn_weights(trajectory.turns), strict=True)
    ]
