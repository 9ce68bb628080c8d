"""Failures of an episode: an error or a hang of foreign code ends that attempt alone, and is recorded once.

Always true: foreign code (environment, agent, tool, engine) is awaited through `bounded`, and whatever it raises becomes
an `EpisodeFailure` that names the boundary it came from, `SystemExit` and a `CancelledError` of its own included. Only a
cancellation that the attempt's owner asked for passes through untouched.
"""

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Self, TypeVar

from rollwright.aio import is_cancellation, timeout_queue
from rollwright.errors import RollwrightError
from rollwright.trajectory import Boundary, ErrorRecord

Answer = TypeVar("Answer")

TIMEOUT = "timeout"
"""`ErrorRecord.kind` of a call or an episode that exceeded its time limit."""


class EpisodeFailure(RollwrightError):
    """The episode could not be played to its end; nothing of it may count as a result."""

    def __init__(self, record: ErrorRecord) -> None:
        super().__init__(f"{record.boundary}: {record.kind}: {record.message}")
        self.record = record

    @staticmethod
    def cause(message: str) -> str:
        """Boundary and kind of the failure: few distinct values, so that failures can be counted by it."""
        return ": ".join(message.split(": ", 2)[:2])


class TimeLimit:
    """`with TimeLimit(seconds) as limit:` raises `TimeoutError` inside the block when the time is up.

    Equivalent to `asyncio.timeout` at a quarter of its cost; every turn of every episode uses it at least twice.
    """

    __slots__ = ("_cancelling", "_seconds", "_task", "_timeouts", "expired")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.expired = False

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None, "a time limit needs a running task"
        self._task = task
        self._cancelling = task.cancelling()
        self._timeouts = timeout_queue(loop, self._seconds)
        self._timeouts.start(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timeouts.cancel(self)
        if self.expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        self.expired = True
        self._task.cancel()


async def bounded(call: Awaitable[Answer], seconds: float, boundary: Boundary, turn: int) -> Answer:
    """Awaits a call of foreign code; its exception or its hang becomes an `EpisodeFailure`."""
    limit = TimeLimit(seconds)
    try:
        with limit:
            return await call
    except EpisodeFailure:
        raise
    except BaseException as error:
        if is_cancellation(error):
            raise
        if limit.expired:
            raise timed_out(boundary, f"no answer within {seconds:g} s", turn) from error
        raise failed(boundary, error, turn) from error


def failed(boundary: Boundary, error: BaseException, turn: int) -> EpisodeFailure:
    """Converts an exception to a failure; of an exception group, the first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    message = " ".join(str(error).split())
    if not message and isinstance(error, asyncio.CancelledError):
        message = "raised by the code itself; nobody had cancelled the attempt"
    return EpisodeFailure(ErrorRecord(boundary, type(error).__name__, message, turn))


def timed_out(boundary: Boundary, message: str, turn: int) -> EpisodeFailure:
    return EpisodeFailure(ErrorRecord(boundary, TIMEOUT, message, turn))
