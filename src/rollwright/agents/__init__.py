"""Agents: they request generations from a session, and do not depend on stores, workers or training."""

from typing import TYPE_CHECKING

from rollwright.lazy import lazy_names
from rollwright.trajectory import Phase

if TYPE_CHECKING:
    from rollwright.agents.chat import ChatAgent
    from rollwright.agents.failures import (
        TIMEOUT,
        EpisodeFailure,
        TimeLimit,
        bounded,
        failed,
        timed_out,
    )
    from rollwright.agents.journal import (
        AttemptInterrupted,
        Journal,
        JournalEntry,
        ReplayDiffers,
        Superseded,
        entries,
    )
    from rollwright.agents.session import OutOfRoom, Session, SiblingCalls
    from rollwright.agents.settings import History, HistoryMode
    from rollwright.agents.timing import Stopwatch

__all__ = [
    "TIMEOUT",
    "AttemptInterrupted",
    "ChatAgent",
    "EpisodeFailure",
    "History",
    "HistoryMode",
    "Journal",
    "JournalEntry",
    "OutOfRoom",
    "Phase",
    "ReplayDiffers",
    "Session",
    "SiblingCalls",
    "Stopwatch",
    "Superseded",
    "TimeLimit",
    "bounded",
    "entries",
    "failed",
    "timed_out",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AttemptInterrupted": "journal",
        "ChatAgent": "chat",
        "EpisodeFailure": "failures",
        "History": "settings",
        "HistoryMode": "settings",
        "Journal": "journal",
        "JournalEntry": "journal",
        "OutOfRoom": "session",
        "ReplayDiffers": "journal",
        "Session": "session",
        "SiblingCalls": "session",
        "Stopwatch": "timing",
        "Superseded": "journal",
        "TIMEOUT": "failures",
        "TimeLimit": "failures",
        "bounded": "failures",
        "entries": "journal",
        "failed": "failures",
        "timed_out": "failures",
    },
)
