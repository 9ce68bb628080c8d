"""Filters: exclude turns, trajectories and groups from the loss, the batch or the baseline.

Each name is imported with its own module when it is first used: a ledger counts catches without the filters' settings.
"""

from typing import TYPE_CHECKING

from rollwright.lazy import lazy_names

if TYPE_CHECKING:
    from rollwright.rollout.filters.applying import Judged, judge, judge_group, stops
    from rollwright.rollout.filters.base import Action, Catch, Catches, Filter, GroupTest, MemberTest
    from rollwright.rollout.filters.factory import build_filters
    from rollwright.rollout.filters.filters import (
        AccuracyBand,
        Duplicate,
        NoTrainableToken,
        Overlong,
        Repetition,
        VoidTurn,
        WrongFormat,
        ZeroVariance,
        group_filter,
    )


__all__ = [
    "AccuracyBand",
    "Action",
    "Catch",
    "Catches",
    "Duplicate",
    "Filter",
    "GroupTest",
    "Judged",
    "MemberTest",
    "NoTrainableToken",
    "Overlong",
    "Repetition",
    "VoidTurn",
    "WrongFormat",
    "ZeroVariance",
    "build_filters",
    "group_filter",
    "judge",
    "judge_group",
    "stops",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AccuracyBand": "filters",
        "Action": "base",
        "Catch": "base",
        "Catches": "base",
        "Duplicate": "filters",
        "Filter": "base",
        "WrongFormat": "filters",
        "GroupTest": "base",
        "Judged": "applying",
        "MemberTest": "base",
        "NoTrainableToken": "filters",
        "Overlong": "filters",
        "Repetition": "filters",
        "VoidTurn": "filters",
        "ZeroVariance": "filters",
        "build_filters": "factory",
        "group_filter": "filters",
        "judge": "applying",
        "judge_group": "applying",
        "stops": "applying",
    },
)
