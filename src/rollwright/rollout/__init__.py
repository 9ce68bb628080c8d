"""Playing rollouts: environment managers, the scheduler, strategies and filters.

Names are imported lazily: reading a run's ledger does not import the scheduler.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollwright.rollout.accounting import Activity, Fate, Ledger
    from rollwright.rollout.attempt import Assignment, RolloutContext, SettingsSource
    from rollwright.rollout.concurrency import InflightLimit
    from rollwright.rollout.env_manager import EnvManager
    from rollwright.rollout.episode import ChainStrategy, Episode, EpisodeSettings
    from rollwright.rollout.function import AgentFunction, ThreadSession
    from rollwright.rollout.groups import Group, GroupBook, GroupRules
    from rollwright.rollout.scheduler import Batch, RolloutScheduler, TooManyRefills
    from rollwright.rollout.worker import RolloutWorker, WorkerSettings

_MODULES = {
    "Activity": "accounting",
    "Fate": "accounting",
    "Ledger": "accounting",
    "Assignment": "attempt",
    "RolloutContext": "attempt",
    "SettingsSource": "attempt",
    "InflightLimit": "concurrency",
    "EnvManager": "env_manager",
    "ChainStrategy": "episode",
    "Episode": "episode",
    "EpisodeSettings": "episode",
    "AgentFunction": "function",
    "ThreadSession": "function",
    "Group": "groups",
    "GroupBook": "groups",
    "GroupRules": "groups",
    "Batch": "scheduler",
    "RolloutScheduler": "scheduler",
    "TooManyRefills": "scheduler",
    "RolloutWorker": "worker",
    "WorkerSettings": "worker",
}

__all__ = [
    "Activity",
    "AgentFunction",
    "Assignment",
    "Batch",
    "ChainStrategy",
    "EnvManager",
    "Episode",
    "EpisodeSettings",
    "Fate",
    "Group",
    "GroupBook",
    "GroupRules",
    "InflightLimit",
    "Ledger",
    "RolloutContext",
    "RolloutScheduler",
    "RolloutWorker",
    "SettingsSource",
    "ThreadSession",
    "TooManyRefills",
    "WorkerSettings",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
