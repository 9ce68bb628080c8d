"""Credit for decisions: a turn is compared with its siblings, the other decisions taken in the same place.

V(leaf) is the reward of its path, V(turn) the mean over its *children*, not its leaves, so that branching more
below one of two siblings favours neither. A turn without siblings inherits from its parent; the siblings of a root are
all other roots of the group, in whichever rollout. A group of chains gives exactly RLOO, or DrGRPO where a turn is
compared with the mean that it is part of.

A turn that stands for several equal ones is compared with its copies too, but what it hands down is compared with the
different ones alone: its copies have its own value, and what is inherited must not be compared with itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollwright.training.advantages.base import (
    Groups,
    TurnAdvantages,
    admitted,
    centred,
    leave_one_out,
    nothing,
    with_penalties,
)
from rollwright.trajectory import Trajectory, children, leaves

Compare = Callable[[Sequence[float], Sequence[int]], list[tuple[float, float | None]]]
"""From the values of siblings, and how many equal ones each stands for: the advantage of each, and what it hands down;
`None`: what it inherited itself."""


@dataclass(frozen=True)
class TurnTree:
    """Value minus the mean of the siblings' values."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        return _among_siblings(groups, _with_the_others)


@dataclass(frozen=True)
class SegmentValue:
    """Value minus that of the place it was taken in, which is the mean over all that were taken there (SPO). Turns that
    follow each other without a branch are one segment. Among k of them this is (k - 1)/k of what `TurnTree` gives."""

    std: bool = False
    """Whether it is divided by the siblings' standard deviation."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        return _among_siblings(groups, self._with_all)

    def _with_all(self, values: Sequence[float], counts: Sequence[int]) -> list[tuple[float, float | None]]:
        return [(each, each) for each in centred(values, counts, std=self.std)]


def _with_the_others(values: Sequence[float], counts: Sequence[int]) -> list[tuple[float, float | None]]:
    total, size = sum(value * count for value, count in zip(values, counts, strict=True)), sum(counts)
    found: list[tuple[float, float | None]] = []
    for value, count, own in zip(values, counts, leave_one_out(values, counts), strict=True):
        different = size - count
        handed = value - (total - value * count) / different if different else None
        found.append((own, own if count == 1 and different else handed))
    return found


def _among_siblings(groups: Groups, compare: Compare) -> TurnAdvantages:
    return [_group(group, kept, compare) for group, kept in zip(groups, admitted(groups), strict=True)]


def _group(group: Sequence[Trajectory], kept: Sequence[bool], compare: Compare) -> list[list[float]]:
    values = [turn_values(each) if counts else [] for each, counts in zip(group, kept, strict=True)]
    roots = [
        (place, turn)
        for place, (trajectory, counts) in enumerate(zip(group, kept, strict=True))
        if counts
        for turn in trajectory.turns
        if turn.after is None
    ]
    compared = compare([values[place][turn.id] for place, turn in roots], [turn.count for _, turn in roots])
    at_roots: list[dict[int, tuple[float, float]]] = [{} for _ in group]
    for (place, turn), (own, handed) in zip(roots, compared, strict=True):
        at_roots[place][turn.id] = (own, handed or 0.0)
    return [
        with_penalties(trajectory, _below_roots(trajectory, values[place], at_roots[place], compare))
        if counts
        else nothing(trajectory)
        for place, (trajectory, counts) in enumerate(zip(group, kept, strict=True))
    ]


def _below_roots(
    trajectory: Trajectory,
    values: Sequence[float],
    at_roots: Mapping[int, tuple[float, float]],
    compare: Compare,
) -> list[float]:
    """The advantages of all turns, given what the roots have and hand down."""
    found = dict(at_roots)
    below = children(trajectory.turns)
    for parent in trajectory.turns:  # parents come before their children
        inherited = found[parent.id][1]
        siblings = below.get(parent.id, [])
        counts = [trajectory.turns[each].count for each in siblings]
        if sum(counts) == 1:
            found[siblings[0]] = (inherited, inherited)
            continue
        compared = compare([values[each] for each in siblings], counts)
        for child, (own, handed) in zip(siblings, compared, strict=True):
            found[child] = (own, inherited if handed is None else handed)
    return [found[turn.id][0] for turn in trajectory.turns]


def turn_values(trajectory: Trajectory) -> list[float]:
    """For each turn, the mean over its children of their values; at a leaf, the reward of the path to it."""
    turns = trajectory.turns
    sums: list[float] = []
    for turn in turns:
        before = 0.0 if turn.after is None else sums[turn.after]
        sums.append(before + (turn.outcome.reward if turn.outcome else 0.0))
    values = [0.0] * len(turns)
    for leaf in leaves(turns):
        values[leaf] = sums[leaf] + trajectory.episode_reward
    below = children(turns)
    for turn in reversed(turns):
        if own := below.get(turn.id):
            total = sum(values[child] * turns[child].count for child in own)
            values[turn.id] = total / sum(turns[child].count for child in own)
    return values
