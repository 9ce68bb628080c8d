"""Advantages that give all turns of an episode the same value, from the episodes' rewards alone."""

from collections.abc import Callable, Sequence
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


@dataclass(frozen=True)
class GRPO:
    """Reward minus the group's mean, over the group's standard deviation."""

    std: bool = True
    """False: the difference alone, so that easy and hard groups weigh the same."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        return _in_groups(groups, lambda rewards: centred(rewards, std=self.std))


@dataclass(frozen=True)
class DrGRPO:
    """Reward minus the group's mean. Its other half, a constant instead of the length, is the loss's
    `Aggregation.CONSTANT`."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        return _in_groups(groups, lambda rewards: centred(rewards, std=False))


@dataclass(frozen=True)
class RLOO:
    """Reward minus the mean of the group's other members."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        return _in_groups(groups, leave_one_out)


@dataclass(frozen=True)
class ReinforcePlusPlus:
    """Reward normalised over the whole batch."""

    group_baseline: bool = False
    """True: the group's mean is subtracted before."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        kept = _rewards(groups)
        if self.group_baseline:
            kept = [centred(rewards, std=False) for rewards in kept]
        normalised = iter(centred([reward for rewards in kept for reward in rewards], std=True))
        return _spread(groups, [[next(normalised) for _ in rewards] for rewards in kept])


def _in_groups(groups: Groups, compare: Callable[[Sequence[float]], list[float]]) -> TurnAdvantages:
    return _spread(groups, [compare(rewards) for rewards in _rewards(groups)])


def _rewards(groups: Groups) -> list[list[float]]:
    """Of the trajectories that count, by group."""
    return [
        [trajectory.reward for trajectory, counts in zip(group, kept, strict=True) if counts]
        for group, kept in zip(groups, admitted(groups), strict=True)
    ]


def _spread(groups: Groups, values: Sequence[Sequence[float]]) -> TurnAdvantages:
    """One value for each trajectory that counts, given to all its turns."""
    found = []
    for group, kept, own in zip(groups, admitted(groups), values, strict=True):
        left = iter(own)
        found.append(
            [
                with_penalties(trajectory, [next(left)] * len(trajectory.turns))
                if counts
                else nothing(trajectory)
                for trajectory, counts in zip(group, kept, strict=True)
            ]
        )
    return found
