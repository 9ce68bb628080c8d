"""Advantages that treat every root-to-leaf path of a tree as a separate episode, as published methods do; for comparison.

In those methods, a turn that several paths share is in one row for each of them. Here it is in one row, with an advantage
such that weight times advantage equals the sum over those rows. All paths of a group have the same weight, so a decision
with more branches below it weighs more: if branching depends on the state, this estimate is biased (`docs/trees.md`).
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
    with_penalties,
    zeros,
)
from rollwright.training.advantages.tree import turn_values
from rollwright.trajectory import Trajectory, leaves, path, turn_weights


@dataclass(frozen=True)
class PathGRPO:
    """Reward of a path minus the mean over all paths of the group, divided by their standard deviation."""

    std: bool = True
    """False: not divided."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        return _by_paths(groups, lambda trees: _among_all(trees, self.std))


@dataclass(frozen=True)
class TreeGRPO:
    """Sum of a path's advantage among all paths of the group and its advantage among the paths of its own rollout
    (Tree-GRPO's inter- and intra-tree terms). The second term is 0 for turns that all paths of the rollout share."""

    std: bool = True
    """False: not divided."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        return _by_paths(groups, self._compare)

    def _compare(self, trees: "Sequence[_Paths]") -> list[list[float]]:
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
    """Multiplicity of each path: how many identical paths it stands for."""


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
                else zeros(trajectory)
                for trajectory, counts in zip(group, kept, strict=True)
            ]
        )
    return found


def _spread(trajectory: Trajectory, tree: _Paths, advantages: Sequence[float], share: float) -> list[float]:
    """Sum of the advantages of all paths through each turn. `share`: weight of one path, where a rollout has weight 1."""
    sums = [0.0] * len(trajectory.turns)
    for end, count, advantage in zip(tree.ends, tree.counts, advantages, strict=True):
        sums[end] = count * advantage
    for turn in reversed(trajectory.turns):
        if turn.after is not None:
            sums[turn.after] += sums[turn.id]
    return [
        share * total / weight for total, weight in zip(sums, turn_weights(trajectory.turns), strict=True)
    ]
