"""Playing rollouts: environment managers, the scheduler, strategies and filters.

Names are imported lazily: reading a run's ledger does not import the scheduler.
"""

from typing import TYPE_CHECKING

from rollwright.lazy import lazy_names

if TYPE_CHECKING:
    from rollwright.rollout.accounting import Activity, Fate, Ledger
    from rollwright.rollout.agent_session import ThreadSession
    from rollwright.rollout.attempt import Assignment, RolloutContext, SettingsSource
    from rollwright.rollout.concurrency import InflightLimit
    from rollwright.rollout.env_manager import EnvManager
    from rollwright.rollout.episode import ChainStrategy, Episode, EpisodeSettings
    from rollwright.rollout.function import AgentFunction
    from rollwright.rollout.groups import Group, GroupBook, GroupRules
    from rollwright.rollout.scheduler import Batch, RolloutScheduler, TooManyRefills
    from rollwright.rollout.worker import RolloutWorker, WorkerSettings


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

__getattr__ = lazy_names(
    __name__,
    {
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
        "ThreadSession": "agent_session",
        "Group": "groups",
        "GroupBook": "groups",
        "GroupRules": "groups",
        "Batch": "scheduler",
        "RolloutScheduler": "scheduler",
        "TooManyRefills": "scheduler",
        "RolloutWorker": "worker",
        "WorkerSettings": "worker",
    },
)
