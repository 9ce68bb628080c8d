"""Rewards: named, weighted functions and judges over a task and a trajectory; each value is stored as a component."""

from typing import TYPE_CHECKING

from rollwright.lazy import lazy_names

if TYPE_CHECKING:
    from rollwright.rewards.composition import RewardResult, Rewards, WeightedReward
    from rollwright.rewards.failure import RewardFailure
    from rollwright.rewards.functions import reward
    from rollwright.rewards.group_judge import GroupJudge
    from rollwright.rewards.judge import RubricJudge
    from rollwright.rewards.scored import ScoredAttempt
    from rollwright.rewards.settings import parse_rewards

__all__ = [
    "GroupJudge",
    "RewardFailure",
    "RewardResult",
    "Rewards",
    "RubricJudge",
    "ScoredAttempt",
    "WeightedReward",
    "parse_rewards",
    "reward",
]

__getattr__ = lazy_names(
    __name__,
    {
        "GroupJudge": "group_judge",
        "RewardFailure": "failure",
        "RewardResult": "composition",
        "Rewards": "composition",
        "RubricJudge": "judge",
        "ScoredAttempt": "scored",
        "WeightedReward": "composition",
        "parse_rewards": "settings",
        "reward": "functions",
    },
)
