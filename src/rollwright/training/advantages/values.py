"""GAE over tokens, from a critic's value of the state before each token (PPO).

Always true: a turn's reward belongs to its last token; between two turns only `after` links count, so tokens that the
environment wrote are no steps. Where a turn has several children, their mean takes the place of the next token. A turn
outside the loss has no values: it is part of the environment, and its reward goes to the turn before it. The value behind
the last turn is 0. Returns, which the critic learns, are neither whitened nor do they contain penalties.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from rollwright.training.advantages.base import Groups, TokenAdvantages, admitted, turn_rewards
from rollwright.training.advantages.tokens import token_statistics
from rollwright.trajectory import Trajectory

TokenValues: TypeAlias = Sequence[Sequence[Sequence[Sequence[float]]]]
"""Value of the state before each sampled token, by group, trajectory and turn; empty for a turn outside the loss."""


@dataclass(frozen=True)
class ValueEstimate:
    """What a critic's values give, for each sampled token by group, trajectory and turn."""

    advantages: TokenAdvantages
    returns: TokenAdvantages
    """What the value of the state before the token should have been; the target of the critic."""


@runtime_checkable
class ValueBased(Protocol):
    """An advantage that uses the values of `training.critic`."""

    def estimate(self, groups: Groups, values: TokenValues) -> ValueEstimate: ...


@dataclass(frozen=True)
class TokenGAE:
    """Generalised advantage estimation over the sampled tokens of each trajectory (verl's `gae`)."""

    discount: float = 1.0
    """Discount of a reward for each token between; verl's `gamma`."""
    decay: float = 0.95
    """GAE's lambda: 1 uses the observed returns, 0 the value estimates."""
    whiten: bool = True
    """Whether advantages are normalised over all trained tokens of the batch."""

    def __call__(self, groups: Groups) -> TokenAdvantages:
        """Advantages with all values 0: discounted returns."""
        nothing = [
            [[[0.0] * len(turn.sampled_ids) for turn in each.turns] for each in group] for group in groups
        ]
        return self.estimate(groups, nothing).advantages

    def estimate(self, groups: Groups, values: TokenValues) -> ValueEstimate:
        kept = admitted(groups)
        advantages: TokenAdvantages = []
        returns: TokenAdvantages = []
        for group, known in zip(groups, values, strict=True):
            advantages.append([self._advantages(*pair) for pair in zip(group, known, strict=True)])
            returns.append([_sums(*pair) for pair in zip(advantages[-1], known, strict=True)])
        members = [
            (trajectory, own)
            for group, counts, found in zip(groups, kept, advantages, strict=True)
            for trajectory, enters, own in zip(group, counts, found, strict=True)
            if enters
        ]
        mean, scale = token_statistics(members) if self.whiten else (0.0, 1.0)
        for group, counts, found in zip(groups, kept, advantages, strict=True):
            for trajectory, enters, own in zip(group, counts, found, strict=True):
                for turn, tokens in zip(trajectory.turns, own, strict=True):
                    penalty = turn.outcome.penalty if turn.outcome else 0.0
                    tokens[:] = [(each - mean) * scale + penalty if enters else 0.0 for each in tokens]
        return ValueEstimate(advantages, returns)

    def _advantages(self, trajectory: Trajectory, values: Sequence[Sequence[float]]) -> list[list[float]]:
        """For each turn, the advantage of each of its tokens; zeros for a turn without values."""
        turns, rewards = trajectory.turns, turn_rewards(trajectory)
        found: list[list[float]] = [[0.0] * len(turn.sampled_ids) for turn in turns]
        below: list[list[tuple[float, float, int]]] = [[] for _ in turns]
        """For each turn, of its children: value of the state, advantage of the first token, multiplicity."""
        for turn in reversed(turns):
            value, advantage = _means(below[turn.id])
            reward = rewards[turn.id]
            for place in reversed(range(len(values[turn.id]))):
                own = values[turn.id][place]
                error = reward + self.discount * value - own
                advantage = error + self.discount * self.decay * advantage
                found[turn.id][place] = advantage
                value, reward = own, 0.0
            if turn.after is not None:
                below[turn.after].append((value + reward, advantage, turn.count))
        return found


def _means(children: Sequence[tuple[float, float, int]]) -> tuple[float, float]:
    total = sum(count for _, _, count in children)
    if not total:
        return 0.0, 0.0
    return (
        sum(value * count for value, _, count in children) / total,
        sum(advantage * count for _, advantage, count in children) / total,
    )


def _sums(advantages: Sequence[Sequence[float]], values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Advantage plus value of each token; zeros for a turn without values."""
    return [
        [one + other for one, other in zip(turn, own, strict=True)] if own else [0.0] * len(turn)
        for turn, own in zip(advantages, values, strict=True)
    ]
