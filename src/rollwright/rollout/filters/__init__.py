"""Filters: what is left out of the loss, the batch or the baseline, and why."""

from rollwright.rollout.filters.applying import Judged, judge, judge_group, stops
from rollwright.rollout.filters.base import Action, Catch, Catches, Filter, GroupTest, MemberTest
from rollwright.rollout.filters.building import build_filters
from rollwright.rollout.filters.catching import (
    AccuracyBand,
    Duplicate,
    FormatError,
    NoTrainableToken,
    Overlong,
    Repetition,
    VoidTurn,
    ZeroVariance,
)
from rollwright.rollout.filters.own import group_filter

__all__ = [
    "AccuracyBand",
    "Action",
    "Catch",
    "Catches",
    "Duplicate",
    "Filter",
    "FormatError",
    "GroupTest",
    "Judged",
    "MemberTest",
    "NoTrainableToken",
    "Overlong",
    "Repetition",
    "VoidTurn",
    "ZeroVariance",
    "build_filters",
    "group_filter",
    "judge",
    "judge_group",
    "stops",
]
