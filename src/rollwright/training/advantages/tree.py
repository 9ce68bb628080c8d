"""Tree credit: a turn is compared with its siblings, the other decisions taken in the same place.

V(leaf) is the reward of its path, V(turn) the mean over its *children*, not its leaves, so that branching more
below one of two siblings favours neither. A turn without siblings inherits its parent's advantage; the siblings of
a root are all other roots of the group, in whichever rollout. A group of chains gives exactly RLOO.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollwright.training.advantages.base import (
    Groups,
    TurnAdvantages,
    admitted,
    leave_one_out,
    nothing,
    with_penalties,
)
from rollwright.trajectory import Trajectory, children, leaves


@dataclass(frozen=True)
class Tree:
    """Value minus the mean of the siblings' values."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        return [_group(group, kept) for group, kept in zip(groups, admitted(groups), strict=True)]


def _group(group: Sequence[Trajectory], kept: Sequence[bool]) -> list[list[float]]:
    values = [turn_values(each) if counts else [] for each, counts in zip(group, kept, strict=True)]
    roots = [
        (place, turn)
        for place, (trajectory, counts) in enumerate(zip(group, kept, strict=True))
        if counts
        for turn in trajectory.turns
        if turn.after is None
    ]
    compared = leave_one_out(
        [values[place][turn.id] for place, turn in roots], [turn.count for _, turn in roots]
    )
    own = [nothing(trajectory) for trajectory in group]
    for (place, turn), advantage in zip(roots, compared, strict=True):
        own[place][turn.id] = advantage
    return [
        with_penalties(trajectory, _below_roots(trajectory, values[place], own[place]))
        if counts
        else own[place]
        for place, (trajectory, counts) in enumerate(zip(group, kept, strict=True))
    ]


def _below_roots(trajectory: Trajectory, values: Sequence[float], at_roots: Sequence[float]) -> list[float]:
    """The advantages of all turns, given those of the roots."""
    found = list(at_roots)
    below = children(trajectory.turns)
    for parent in trajectory.turns:  # parents come before their children
        siblings = below.get(parent.id, [])
        counts = [trajectory.turns[each].count for each in siblings]
        if sum(counts) == 1:
            found[siblings[0]] = found[parent.id]
            continue
        for child, advantage in zip(
            siblings, leave_one_out([values[each] for each in siblings], counts), strict=True
        ):
            found[child] = advantage
    return found


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
