"""Playing rollouts: environment managers, the scheduler, strategies and filters."""

from rollwright.rollout.accounting import Activity, Fate, Ledger
from rollwright.rollout.attempt import Assignment, RolloutContext, SettingsSource
from rollwright.rollout.concurrency import InflightLimit
from rollwright.rollout.env_manager import EnvManager
from rollwright.rollout.episode import ChainStrategy, Episode, EpisodeSettings
from rollwright.rollout.function import AgentFunction, ThreadSession
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
