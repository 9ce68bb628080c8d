"""REINFORCE++ as verl defines it: the return of each token, whitened over all tokens of the batch.

Always true: statistics are over trained tokens, so a long trajectory weighs more in them than a short one; tokens of a tree
count by the weights of their turns. A turn's reward belongs to its last token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollwright.training.advantages.base import Groups, TokenAdvantages, admitted, turn_rewards
from rollwright.trajectory import Trajectory, turn_weights

_VARIANCE_FLOOR = 1e-8
"""Added to a variance before its root, as in verl."""


@dataclass(frozen=True)
class ReinforcePlusPlusTokens:
    """Discounted return of each token, normalised over all tokens of the batch (verl's `reinforce_plus_plus`)."""

    discount: float = 1.0
    """Discount of a reward for each token between; verl's `gamma`."""
    group_baseline: bool = False
    """True: reward of the whole trajectory minus the group mean, for all tokens (verl's `reinforce_plus_plus_baseline`)."""

    def __call__(self, groups: Groups) -> TokenAdvantages:
        kept = admitted(groups)
        found: TokenAdvantages = []
        for group, counts in zip(groups, kept, strict=True):
            baseline = self._baseline(group, counts) if self.group_baseline else 0.0
            found.append([self._returns(trajectory, baseline) for trajectory in group])
        members = [
            (trajectory, own)
            for group, counts, values in zip(groups, kept, found, strict=True)
            for trajectory, enters, own in zip(group, counts, values, strict=True)
            if enters
        ]
        mean, scale = token_statistics(members)
        for group, counts, values in zip(groups, kept, found, strict=True):
            for trajectory, enters, own in zip(group, counts, values, strict=True):
                for turn, tokens in zip(trajectory.turns, own, strict=True):
                    penalty = turn.outcome.penalty if turn.outcome else 0.0
                    tokens[:] = [(each - mean) * scale + penalty if enters else 0.0 for each in tokens]
        return found

    def _baseline(self, group: Sequence[Trajectory], counts: Sequence[bool]) -> float:
        rewards = [trajectory.reward for trajectory, enters in zip(group, counts, strict=True) if enters]
        return math.fsum(rewards) / len(rewards) if len(rewards) > 1 else 0.0

    def _returns(self, trajectory: Trajectory, baseline: float) -> list[list[float]]:
        """For each turn, the return of each sampled token."""
        turns = trajectory.turns
        if self.group_baseline:
            return [[trajectory.reward - baseline] * len(turn.sampled_ids) for turn in turns]
        rewards = turn_rewards(trajectory)
        found: list[list[float]] = [[] for _ in turns]
        after: list[list[tuple[float, int]]] = [[] for _ in turns]
        """For each turn, return and multiplicity of its children."""
        for turn in reversed(turns):
            children = after[turn.id]
            later = (
                sum(value * count for value, count in children) / sum(count for _, count in children)
                if children
                else 0.0
            )
            own = []
            for place in range(len(turn.sampled_ids)):
                later = (rewards[turn.id] if place == 0 else 0.0) + self.discount * later
                own.append(later)
            found[turn.id] = own[::-1]
            if turn.after is not None:
                after[turn.after].append((later, turn.count))
        return found


def token_statistics(
    members: Sequence[tuple[Trajectory, Sequence[Sequence[float]]]],
) -> tuple[float, float]:
    """Mean and reciprocal standard deviation over the trained tokens of these trajectories."""
    values: list[float] = []
    weights: list[float] = []
    for trajectory, own in members:
        for turn, weight, tokens in zip(trajectory.turns, turn_weights(trajectory.turns), own, strict=True):
            if trajectory.untrained(turn) is None:
                values += tokens
                weights += [weight] * len(tokens)
    total = math.fsum(weights)
    if total <= 1:
        return (values[0] if values else 0.0), 1.0
    mean = math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / total
    squares = math.fsum(weight * (value - mean) ** 2 for value, weight in zip(values, weights, strict=True))
    return mean, 1 / math.sqrt(squares / (total - 1) + _VARIANCE_FLOOR)
