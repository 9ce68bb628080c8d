"""A group as the trainer sees it: the run's own filters applied again, and the advantages of its members.

A run's log holds trajectories as they were played. Filters and advantages are pure, so they reproduce the run's decisions.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rollwright.config import RunConfig
from rollwright.rollout.filters import (
    Catches,
    Filter,
    GroupTest,
    MemberTest,
    build_filters,
    judge,
    judge_group,
)
from rollwright.run.build_training import make_training_advantage
from rollwright.training.advantages import Groups, TokenAdvantages, TurnAdvantages
from rollwright.training.advantages import TurnTree as TreeCredit
from rollwright.trajectory import Trajectory


class JudgedGroup(NamedTuple):
    """A group after its filters."""

    judged: list[Trajectory]
    """Members that were not replaced, after the filters of turns and trajectories."""
    members: list[Trajectory]
    """The same members after all filters."""
    catches: Catches
    replaced: dict[str, str]
    """Names of the filters that replaced a rollout, by rollout."""
    dropped: str | None
    """Name of the filter that drops the whole group."""


def filters_for(config: RunConfig, group_id: str) -> tuple[Filter, ...]:
    """Filters that apply to a group of the run: only training has any. Raises a `ConfigError` for a filter of the user's own
    that cannot be imported."""
    if config.train_env_manager is None or not group_id.startswith(f"{config.name}.train-"):
        return ()
    return build_filters(config.train_env_manager)


def judged_group(filters: Sequence[Filter], group: Sequence[Trajectory]) -> JudgedGroup:
    """In the order of its members, as it was judged while the run played; the log has them as they ended."""
    catches = Catches()
    in_order = sorted(group, key=lambda each: (len(each.rollout_id), each.rollout_id))  # m2 before m10
    judged = [judge(filters, each, catches) for each in in_order]
    replaced = {each.trajectory.rollout_id: each.dropped for each in judged if each.dropped is not None}
    kept = [each.trajectory for each in judged if each.dropped is None]
    members, dropped = judge_group(filters, kept, catches)
    return JudgedGroup(kept, members, catches, replaced, dropped)


def caught_beside(filters: Sequence[Filter], members: Sequence[Trajectory], rollout_id: str) -> list[str]:
    """Names of the filters that caught this member by comparison with the group, or the whole group."""
    places = [place for place, each in enumerate(members) if each.rollout_id == rollout_id]
    return [
        each.name
        for each in filters
        if (isinstance(each.test, MemberTest) and set(places) & set(each.test.caught_members(members)))
        or (isinstance(each.test, GroupTest) and places and each.test.catches_group(members))
    ]


def batch_advantages(config: RunConfig, groups: Groups) -> tuple[str, TurnAdvantages | TokenAdvantages]:
    """Name of the advantage estimator and its values, for turns or single tokens: the training's, or `tree` for a run without training."""
    training = config.training
    if training is None:
        return "tree", TreeCredit()(groups)
    return training.advantage.name, make_training_advantage(training)(groups)
