"""Agents: they request generations from a session, and do not depend on stores, workers or training."""

from rollwright.agents.chat import ChatAgent
from rollwright.agents.failures import (
    TIMEOUT,
    EpisodeFailure,
    TimeLimit,
    bounded,
    failed,
    timed_out,
    together,
)
from rollwright.agents.journal import (
    AttemptInterrupted,
    Journal,
    JournalEntry,
    ReplayDiffers,
    Superseded,
    entries,
)
from rollwright.agents.session import OutOfRoom, Session
from rollwright.agents.settings import History, HistoryMode
from rollwright.agents.timing import Stopwatch
from rollwright.trajectory import Phase

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
    "Stopwatch",
    "Superseded",
    "TimeLimit",
    "bounded",
    "entries",
    "failed",
    "timed_out",
    "together",
]
