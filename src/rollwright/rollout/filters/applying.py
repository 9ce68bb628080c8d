"""Application of filters to trajectories and groups. Pure: the arguments are never changed.

Always true: applying the same filters again changes nothing. Masks and counts do not depend on the order of the
filters; if two filters catch the same object and one drops it, it is dropped, and both have counted it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from rollwright.rollout.filters.base import (
    Action,
    Catches,
    Filter,
    GroupTest,
    MemberTest,
    Penalty,
    Reasoned,
    TrajectoryTest,
    TurnTest,
)
from rollwright.trajectory import Trajectory, Turn, leaves, path, turn_weights


class Judged(NamedTuple):
    trajectory: Trajectory
    dropped: str | None
    """The filter that leaves it out; `None`: it stays."""


def judge(filters: Sequence[Filter], trajectory: Trajectory, catches: Catches) -> Judged:
    """Applies the filters of turns and trajectories."""
    dropped: str | None = None
    for each in filters:
        caught = _caught_turns(each, trajectory)
        if isinstance(each.test, TrajectoryTest) and each.test.catches(trajectory):
            caught = None
        if caught == []:
            continue
        catches.add(each.name, trajectory.rollout_id, 1 if caught is None else len(caught))
        if each.action is Action.DROP:
            dropped = dropped or each.name
        else:
            trajectory = _carried_out(each, trajectory, caught)
    return Judged(trajectory, dropped)


def judge_group(
    filters: Sequence[Filter], group: Sequence[Trajectory], catches: Catches
) -> tuple[list[Trajectory], str | None]:
    """Applies the filters of complete groups; returns the changed members, and the filter that drops the whole group, with
    its reason if it gives one."""
    members, dropped = list(group), None
    for each in filters:
        if isinstance(each.test, MemberTest):
            for place in each.test.caught_members(group):
                catches.add(each.name, members[place].rollout_id)
                if each.action is Action.MASK:
                    members[place] = _masked(each, members[place], None)
        elif isinstance(each.test, GroupTest) and each.test.catches_group(group):
            catches.add(each.name, group[0].group_id)
            if each.action is Action.DROP:
                dropped = dropped or _because(each, group)
            elif each.action is Action.MASK:
                members = [_masked(each, member, None) for member in members]
    return members, dropped


def _because(each: Filter, group: Sequence[Trajectory]) -> str:
    return f"{each.name}: {each.test.reason(group)}" if isinstance(each.test, Reasoned) else each.name


def stops(filters: Sequence[Filter], turn: Turn) -> bool:
    """Whether an episode ends with this turn."""
    return any(
        each.action is Action.STOP and isinstance(each.test, TurnTest) and each.test.catches_turn(turn)
        for each in filters
    )


def _caught_turns(each: Filter, trajectory: Trajectory) -> list[int] | None:
    if not isinstance(each.test, TurnTest):
        return []
    return [turn.id for turn in trajectory.turns if each.test.catches_turn(turn)]


def _carried_out(each: Filter, trajectory: Trajectory, caught: list[int] | None) -> Trajectory:
    match each.action:
        case Action.MASK:
            return _masked(each, trajectory, caught)
        case Action.STOP:
            return _masked(each, trajectory, _given_up(trajectory.turns, caught or ()))
        case Action.PENALISE if isinstance(each.test, Penalty):
            return _penalised(each, trajectory, each.test.penalties(trajectory))
        case _:
            return trajectory


def _masked(each: Filter, trajectory: Trajectory, caught: list[int] | None) -> Trajectory:
    """A copy with these turns masked; `None`: all turns."""
    if caught is None:
        return msgspec.structs.replace(
            trajectory,
            filtered=trajectory.filtered or each.name,
            in_baseline=trajectory.in_baseline and each.baseline,
        )
    turns = list(trajectory.turns)
    for place in caught:
        turns[place] = msgspec.structs.replace(turns[place], filtered=turns[place].filtered or each.name)
    return msgspec.structs.replace(trajectory, turns=turns)


def _given_up(turns: Sequence[Turn], caught: Sequence[int]) -> list[int] | None:
    """Turns that are only on paths with a caught turn; `None`: all turns, as in a chain."""
    ways = ([turn.id for turn in path(turns, leaf)] for leaf in leaves(turns))
    played_on = {turn for way in ways if not set(way) & set(caught) for turn in way}
    return [turn.id for turn in turns if turn.id not in played_on] if played_on else None


def _penalised(each: Filter, trajectory: Trajectory, penalties: Mapping[int, float]) -> Trajectory:
    """A copy with the penalty of each path on its last turn; idempotent."""
    if each.name in trajectory.penalties:
        return trajectory
    turns = list(trajectory.turns)
    for leaf, penalty in penalties.items():
        if (outcome := turns[leaf].outcome) is not None:
            added = msgspec.structs.replace(outcome, penalty=outcome.penalty + penalty)
            turns[leaf] = msgspec.structs.replace(turns[leaf], outcome=added)
    weights = turn_weights(turns)
    total = sum(weights[leaf] * penalty for leaf, penalty in penalties.items())
    return msgspec.structs.replace(
        trajectory, turns=turns, penalties={**trajectory.penalties, each.name: total}
    )
