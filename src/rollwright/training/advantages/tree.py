"""Tree advantages: a turn is compared with its siblings, the other decisions taken in the same state.

V(leaf) is the reward of its path; V(turn) is the mean over its *children*, not over its leaves, so that more branches below
one of two siblings favour neither. A turn without siblings inherits the advantage of its parent. The siblings of a root are
the roots of all rollouts of the group. A group of chains gives exactly RLOO (`TurnTree`) or Dr. GRPO (`SegmentValue`).

Identical siblings are stored once with a `count`. For its own advantage, a turn is compared with its copies too. For the
advantage that its descendants inherit, it is compared with the different siblings alone: the copies have its own value,
and a value must not be compared with itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollwright.training.advantages.base import (
    Groups,
    TurnAdvantages,
    admitted,
    centred,
    leave_one_out,
    with_penalties,
    zeros,
)
from rollwright.trajectory import Trajectory, children, leaves

Compare = Callable[[Sequence[float], Sequence[int]], list[tuple[float, float | None]]]
"""From values and counts of siblings: the advantage of each, and the advantage that its descendants inherit (`None`: the
one that it inherited itself)."""


@dataclass(frozen=True)
class TurnTree:
    """Value of a turn minus the mean value of its siblings."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        return _among_siblings(groups, _with_the_others)


@dataclass(frozen=True)
class SegmentValue:
    """Value of a turn minus the value of its parent, which is the mean over all children of that parent (SPO). Turns that
    follow each other without a branch are one segment. With k siblings this is (k - 1)/k of `TurnTree`."""

    std: bool = False
    """Whether the difference is divided by the standard deviation of the siblings' values."""

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
        else zeros(trajectory)
        for place, (trajectory, counts) in enumerate(zip(group, kept, strict=True))
    ]


def _below_roots(
    trajectory: Trajectory,
    values: Sequence[float],
    at_roots: Mapping[int, tuple[float, float]],
    compare: Compare,
) -> list[float]:
    """Advantages of all turns, given own and inherited advantages of the roots."""
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
    """Value of each turn: the mean value of its children; at a leaf, the reward along the path to it."""
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
