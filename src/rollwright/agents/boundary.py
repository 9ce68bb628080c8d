"""The boundaries of an episode: whatever fails behind one ends that attempt alone, and is recorded once.

What crosses is an `EpisodeFailure` that names the boundary; cancellation passes through untouched.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from rollwright.errors import RollwrightError
from rollwright.trajectory import Boundary, ErrorRecord

Answer = TypeVar("Answer")


class EpisodeFailure(RollwrightError):
    """The episode could not be played to its end; nothing of it may count as a result."""

    def __init__(self, record: ErrorRecord) -> None:
        super().__init__(f"{record.boundary}: {record.kind}: {record.message}")
        self.record = record

    @staticmethod
    def cause(message: str) -> str:
        """Boundary and kind out of a failure's message: few enough to count by."""
        return ": ".join(message.split(": ", 2)[:2])


async def bounded(call: Awaitable[Answer], seconds: float, boundary: Boundary, turn: int) -> Answer:
    """Awaits a call across a boundary; its exception or its hang becomes an `EpisodeFailure`."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await call
    except EpisodeFailure:
        raise
    except Exception as error:
        if limit.expired():
            raise timed_out(boundary, f"no answer within {seconds:g} s", turn) from error
        raise failed(boundary, error, turn) from error


def failed(boundary: Boundary, error: Exception, turn: int) -> EpisodeFailure:
    return EpisodeFailure(ErrorRecord(boundary, type(error).__name__, " ".join(str(error).split()), turn))


def timed_out(boundary: Boundary, message: str, turn: int) -> EpisodeFailure:
    return EpisodeFailure(ErrorRecord(boundary, TIMEOUT, message, turn))


TIMEOUT = "timeout"
"""`ErrorRecord.kind` of whatever took too long."""
