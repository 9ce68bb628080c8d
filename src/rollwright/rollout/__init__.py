"""Playing rollouts: environment managers, the scheduler, strategies and filters."""

from rollwright.rollout.activity import Activity
from rollwright.rollout.env_manager import EnvManager, Playbook, Role, RolloutContext
from rollwright.rollout.episode import Chain, Episode, EpisodeSettings
from rollwright.rollout.function import AgentFunction, ThreadSession
from rollwright.rollout.gate import Gate
from rollwright.rollout.groups import Group, GroupBook, GroupRules
from rollwright.rollout.ledger import Ledger, Place
from rollwright.rollout.scheduler import Batch, RolloutScheduler, TooManyRefills

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
    "Place",
    "Playbook",
    "Role",
    "RolloutContext",
    "RolloutScheduler",
    "ThreadSession",
    "TooManyRefills",
]
