"""Tree advantages: a turn is compared with its siblings, the other decisions taken in the same state.

V(leaf) is the reward of its path; V(turn) is the mean over its *children*, not over its leaves, so that more branches below
one of two siblings favour neither. A turn without siblings inherits the advantage of its parent. The siblings of a root are
the roots of all rollouts of the group. A group of chains gives exactly RLOO (`TurnTree`) or Dr. GRPO (`SegmentValue`).

A baseline never contains a value from below the turn that it is for. So it may be handed down: with `kappa` above 0, what a
turn was compared with counts as `kappa` more siblings of each of its children, and the estimate stays unbiased.

Identical siblings are stored once with a `count`. For its own advantage, a turn is compared with its copies too. For the
advantage that its descendants inherit, it is compared with the different siblings alone: the copies have its own value,
and a value must not be compared with itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollwright.training.advantages.base import (
    Groups,
    TurnAdvantages,
    admitted,
    centred,
    leave_one_out,
    with_penalties,
    zeros,
)
from rollwright.training.advantages.running import ShrunkBaseline
from rollwright.trajectory import Trajectory, children, leaves


class Handed(NamedTuple):
    """What a turn hands down to the turns below it."""

    advantage: float = 0.0
    """The advantage of a descendant without siblings."""
    baseline: float | None = None
    """What the turn was compared with; `None`: with nothing, or it is not used."""


Compare = Callable[[Sequence[float], Sequence[int], Handed], list[tuple[float, Handed]]]
"""From values and counts of siblings, and what their parent hands down: the advantage of each, and what it hands down."""


@dataclass(frozen=True)
class TurnTree(ShrunkBaseline):
    """Value of a turn minus the mean value of its siblings, in which the baseline of its parent counts as `kappa` more of
    them. What a root is compared with beside the other roots is the running value of its tag."""

    kappa: float = 0.0
    """Number of siblings that the parent's baseline counts as. 0: the siblings alone."""
    decay: float = 0.95
    """Factor by which the weight of earlier groups in the running value falls with each group; for `kappa` above 0."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        return [
            _group(group, kept, self._with_the_others, self.prior(group[0].tag) if group else None)
            for group, kept in zip(groups, admitted(groups), strict=True)
        ]

    def _with_the_others(
        self, values: Sequence[float], counts: Sequence[int], above: Handed
    ) -> list[tuple[float, Handed]]:
        prior, kappa = above.baseline or 0.0, 0.0 if above.baseline is None else self.kappa
        total, size = sum(value * count for value, count in zip(values, counts, strict=True)), sum(counts)
        found: list[tuple[float, Handed]] = []
        for value, count, own in zip(
            values, counts, leave_one_out(values, counts, kappa=kappa, prior=prior), strict=True
        ):
            different = size - count
            if different or kappa:
                baseline = (total - value * count + kappa * prior) / (different + kappa)
                handed = Handed(own if count == 1 else value - baseline, baseline)
            else:
                handed = above
            found.append((own, handed))
        return found


@dataclass(frozen=True)
class SegmentValue:
    """Value of a turn minus the value of its parent, which is the mean over all children of that parent (SPO). Turns that
    follow each other without a branch are one segment. With k siblings this is (k - 1)/k of `TurnTree`."""

    std: bool = False
    """Whether the difference is divided by the standard deviation of the siblings' values."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        return [
            _group(group, kept, self._with_all, None)
            for group, kept in zip(groups, admitted(groups), strict=True)
        ]

    def _with_all(
        self, values: Sequence[float], counts: Sequence[int], above: Handed
    ) -> list[tuple[float, Handed]]:
        return [(each, Handed(each)) for each in centred(values, counts, std=self.std)]


def _group(
    group: Sequence[Trajectory], kept: Sequence[bool], compare: Compare, prior: float | None
) -> list[list[float]]:
    """`prior`: what roots are compared with beside the other roots of the group."""
    values = [turn_values(each) if counts else [] for each, counts in zip(group, kept, strict=True)]
    roots = [
        (place, turn)
        for place, (trajectory, counts) in enumerate(zip(group, kept, strict=True))
        if counts
        for turn in trajectory.turns
        if turn.after is None
    ]
    compared = compare(
        [values[place][turn.id] for place, turn in roots],
        [turn.count for _, turn in roots],
        Handed(baseline=prior),
    )
    at_roots: list[dict[int, tuple[float, Handed]]] = [{} for _ in group]
    for (place, turn), credit in zip(roots, compared, strict=True):
        at_roots[place][turn.id] = credit
    return [
        with_penalties(trajectory, _below_roots(trajectory, values[place], at_roots[place], compare))
        if counts
        else zeros(trajectory)
        for place, (trajectory, counts) in enumerate(zip(group, kept, strict=True))
    ]


def _below_roots(
    trajectory: Trajectory,
    values: Sequence[float],
    at_roots: Mapping[int, tuple[float, Handed]],
    compare: Compare,
) -> list[float]:
    """Advantages of all turns, given the advantages of the roots and what they hand down."""
    found = dict(at_roots)
    below = children(trajectory.turns)
    for parent in trajectory.turns:  # parents come before their children
        handed = found[parent.id][1]
        siblings = below.get(parent.id, [])
        counts = [trajectory.turns[each].count for each in siblings]
        if sum(counts) == 1:
            found[siblings[0]] = (handed.advantage, handed)
            continue
        compared = compare([values[each] for each in siblings], counts, handed)
        found |= zip(siblings, compared, strict=True)
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
