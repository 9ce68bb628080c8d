"""Rewards: named, weighted functions and judges over a task and a trajectory, whose values are kept.

Each name is imported with its own module when it is first used: a configuration needs the settings alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollwright.rewards.composition import RewardResult, Rewards, WeightedReward
    from rollwright.rewards.failure import RewardFailure
    from rollwright.rewards.functions import reward
    from rollwright.rewards.group_judge import GroupJudge
    from rollwright.rewards.judge import RubricJudge
    from rollwright.rewards.scored import ScoredAttempt
    from rollwright.rewards.settings import parse_rewards

_MODULES = {
    "GroupJudge": "group_judge",
    "RewardFailure": "failure",
    "RewardResult": "composition",
    "Rewards": "composition",
    "RubricJudge": "judge",
    "ScoredAttempt": "scored",
    "WeightedReward": "composition",
    "parse_rewards": "settings",
    "reward": "functions",
}

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


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
