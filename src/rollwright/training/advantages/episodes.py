"""Advantages computed from episode rewards alone: GRPO, Dr. GRPO, RLOO, REINFORCE++ and agent-wise GRPO.

All turns of an episode get the same value; with agent-wise GRPO, all turns of one agent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True)
class GRPO:
    """Reward minus the group mean, divided by the group's standard deviation."""

    std: bool = True
    """False: not divided, so that groups with a small spread of rewards are not amplified."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        return _in_groups(groups, lambda rewards: centred(rewards, std=self.std))


@dataclass(frozen=True)
class DrGRPO:
    """Reward minus the group mean. Dr. GRPO also divides the loss by a constant instead of the length:
    `Aggregation.CONSTANT`."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        return _in_groups(groups, lambda rewards: centred(rewards, std=False))


@dataclass(frozen=True)
class RLOO(ShrunkBaseline):
    """Reward minus the mean reward of the other members of the group, shrunk towards the running value of the tag.

    So a small group is compared with more than its few members, and a group whose members all fail or all succeed is not
    without a signal. Unbiased for any fixed `kappa`.
    """

    kappa: float = 0.0
    """Number of members that the running value counts as. 0: the group alone."""
    decay: float = 0.95
    """Factor by which the weight of earlier groups in the running value falls with each group; for `kappa` above 0."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        found = []
        for group, rewards in zip(groups, _rewards(groups), strict=True):
            prior = self.prior(group[0].tag) if group else None
            found.append(leave_one_out(rewards, kappa=self.kappa, prior=prior))
        return _spread(groups, found)


@dataclass(frozen=True)
class ReinforcePlusPlus:
    """Reward normalised over all trajectories of the batch; each trajectory counts once.

    verl's estimator of the same name normalises over all *tokens* of the batch, so that long trajectories weigh more in
    mean and standard deviation, and discounts the return of each token. With trajectories of different lengths the two
    give different advantages.
    """

    group_baseline: bool = False
    """True: the group mean is subtracted first (verl's `reinforce_plus_plus_baseline`, with the same difference)."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        kept = _rewards(groups)
        if self.group_baseline:
            kept = [centred(rewards, std=False) for rewards in kept]
        normalised = iter(centred([reward for rewards in kept for reward in rewards], std=True))
        return _spread(groups, [[next(normalised) for _ in rewards] for rewards in kept])


@dataclass(frozen=True)
class AgentWise:
    """GRPO with separate statistics for each agent of each group, so that agents with different roles are not mixed."""

    std: bool = True
    per: Literal["call", "trajectory"] = "call"
    """Unit of the statistics: every call of the agent, as in Dr. MAS, or each trajectory in which it was called."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        found: TurnAdvantages = []
        for group, kept in zip(groups, admitted(groups), strict=True):
            rewards: dict[str, list[tuple[int, float]]] = {}
            """For each agent, index and reward of a trajectory; one entry for each unit."""
            for place, (trajectory, counts) in enumerate(zip(group, kept, strict=True)):
                if not counts:
                    continue
                agents = [turn.agent for turn in trajectory.turns]
                for agent in agents if self.per == "call" else dict.fromkeys(agents):
                    rewards.setdefault(agent, []).append((place, trajectory.reward))
            values: dict[tuple[str, int], float] = {}
            for agent, entries in rewards.items():
                compared = centred([reward for _, reward in entries], std=self.std)
                for (place, _), value in zip(entries, compared, strict=True):
                    values[agent, place] = value
            found.append(
                [
                    with_penalties(trajectory, [values[turn.agent, place] for turn in trajectory.turns])
                    if counts
                    else zeros(trajectory)
                    for place, (trajectory, counts) in enumerate(zip(group, kept, strict=True))
                ]
            )
        return found


def _in_groups(groups: Groups, compare: Callable[[Sequence[float]], list[float]]) -> TurnAdvantages:
    return _spread(groups, [compare(rewards) for rewards in _rewards(groups)])


def _rewards(groups: Groups) -> list[list[float]]:
    """Rewards of the admitted trajectories, by group."""
    return [
        [trajectory.reward for trajectory, counts in zip(group, kept, strict=True) if counts]
        for group, kept in zip(groups, admitted(groups), strict=True)
    ]


def _spread(groups: Groups, values: Sequence[Sequence[float]]) -> TurnAdvantages:
    """Gives the value of each admitted trajectory to all its turns."""
    found = []
    for group, kept, own in zip(groups, admitted(groups), values, strict=True):
        left = iter(own)
        found.append(
            [
                with_penalties(trajectory, [next(left)] * len(trajectory.turns))
                if counts
                else zeros(trajectory)
                for trajectory, counts in zip(group, kept, strict=True)
            ]
        )
    return found
