"""Playing rollouts: environment managers, the scheduler, strategies and filters.

Each name is imported with its own module when it is first used: reading a run's ledger loads no scheduler.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollwright.rollout.activity import Activity
    from rollwright.rollout.env_manager import EnvManager, Playbook, Role, RolloutContext
    from rollwright.rollout.episode import Chain, Episode, EpisodeSettings, Limits
    from rollwright.rollout.function import AgentFunction, ThreadSession
    from rollwright.rollout.gate import Gate
    from rollwright.rollout.groups import Group, GroupBook, GroupRules
    from rollwright.rollout.ledger import Ledger, Place
    from rollwright.rollout.scheduler import Batch, RolloutScheduler, TooManyRefills

_MODULES = {
    "Activity": "activity",
    "AgentFunction": "function",
    "Batch": "scheduler",
    "Chain": "episode",
    "EnvManager": "env_manager",
    "Episode": "episode",
    "EpisodeSettings": "episode",
    "Gate": "gate",
    "Group": "groups",
    "GroupBook": "groups",
    "GroupRules": "groups",
    "Ledger": "ledger",
    "Limits": "episode",
    "Place": "ledger",
    "Playbook": "env_manager",
    "Role": "env_manager",
    "RolloutContext": "env_manager",
    "RolloutScheduler": "scheduler",
    "ThreadSession": "function",
    "TooManyRefills": "scheduler",
}

__all__ = [
    "Activity",
    "AgentFunction",
    "Batch",
    "Chain",
    "EnvManager",
    "Episode",
    "EpisodeSettings",
    "Gate",
    "Group",
    "GroupBook",
    "GroupRules",
    "Ledger",
    "Limits",
    "Place",
    "Playbook",
    "Role",
    "RolloutContext",
    "RolloutScheduler",
    "ThreadSession",
    "TooManyRefills",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
