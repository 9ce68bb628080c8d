"""The scoring service: questions and scores from a pool of judges, each in its own sandbox.

Always true: every request is answered once or fails. A judge replies to a request before it starts the next, so the time
limit applies to the first request of its queue. When it expires, the judge is killed, that answer scores 0, and the
requests behind it move to another judge. An answer during which a judge dies is retried once in another judge, because
an earlier answer may have caused the death; requests have no side effects.

The service can be used from any number of event loops and threads. A caller writes to the judge's socket itself; one
thread of the service reads replies, enforces time limits and starts judges.
"""

import asyncio
import atexit
import itertools
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import msgspec

from rollwright.envs.base import EnvironmentFailure
from rollwright.envs.scoring.pool import UNCONFINED_VARIABLE, JudgePool
from rollwright.envs.scoring.protocol import Entry, JudgeOperation, JudgeRequest, QuestionError, Result, Score
from rollwright.errors import ConfigError

SCORE_SECONDS = 5.0
"""Default time limit for scoring one answer; an honest answer takes milliseconds."""

SCORE_MEMORY = 512 << 20
"""Memory of a judge in bytes, beyond its initial size."""

MAX_ANSWER = 20_000
"""Longest answer in characters; the longest expected answers (grids and code outputs) have a few thousand."""

_START_SECONDS = 120.0
"""Timeout of a blocking call, which may wait for the start of the judges (about 3 s on an idle machine)."""


class ScoringService:
    """Client of the judges; `shared` returns the instance of this process."""

    def __init__(self, memory: int = SCORE_MEMORY) -> None:
        allow_unconfined = os.environ.get(UNCONFINED_VARIABLE) == "1"
        self.pool = JudgePool(memory, allow_unconfined=allow_unconfined)
        self._ids = itertools.count()
        self._checked: set[bytes] = set()

    def check(self, dataset: str, options: Mapping[str, Any]) -> None:
        """Validates a dataset and its options, blocking; raises a `ConfigError` that names the error."""
        try:
            key = msgspec.json.encode((dataset, options), order="deterministic")
        except TypeError as error:
            raise ConfigError(f"settings of a dataset must be plain data: {error}") from error
        if key in self._checked:
            return
        try:
            _raise_refusal(self._submit(JudgeOperation.CHECK, dataset, options).result(_START_SECONDS))
        except TimeoutError as error:
            raise EnvironmentFailure(
                f"no reply from the scoring process within {_START_SECONDS:g} s"
            ) from error
        self._checked.add(key)

    async def entry(self, dataset: str, options: Mapping[str, Any], seed: int) -> Entry:
        """The question of a seed, which is the same in every process."""
        result = await self._ask(self._submit(JudgeOperation.ENTRY, dataset, options, seed))
        assert isinstance(result, Entry)
        return result

    async def score(
        self,
        dataset: str,
        options: Mapping[str, Any],
        seed: int,
        answer: str,
        *,
        seconds: float = SCORE_SECONDS,
    ) -> Score:
        """Scores an answer to the question of a seed; an answer above `MAX_ANSWER` characters scores 0."""
        if len(answer) > MAX_ANSWER:
            return Score(0.0, failed=True)
        readable = answer.encode(errors="replace").decode()
        result = await self._ask(
            self._submit(JudgeOperation.SCORE, dataset, options, seed, readable, seconds)
        )
        assert isinstance(result, Score)
        return result

    def close(self) -> None:
        """Ends all judges; a later request starts new ones."""
        self.pool.close()

    def _submit(
        self,
        operation: JudgeOperation,
        dataset: str,
        options: Mapping[str, Any],
        seed: int = 0,
        answer: str = "",
        seconds: float = 0.0,
    ) -> "Future[Result]":
        return self.pool.submit(
            JudgeRequest(next(self._ids), operation, dataset, dict(options), seed, answer, seconds)
        )

    async def _ask(self, outcome: "Future[Result]") -> Result:
        return _raise_refusal(await asyncio.wrap_future(outcome))


def _raise_refusal(result: Result) -> Result:
    if isinstance(result, QuestionError):
        raise ConfigError(result.message) if result.is_config else EnvironmentFailure(result.message)
    return result


_shared: ScoringService | None = None
_shared_lock = threading.Lock()


def shared() -> ScoringService:
    """The service of this process, created on first use and closed at exit."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = ScoringService()
            atexit.register(_shared.close)
        return _shared


def _forget_after_fork() -> None:
    """Drops the service in a forked child, which has no copy of its thread and must not use the parent's judges."""
    global _shared, _shared_lock
    if _shared is not None:
        _shared.pool.abandon()
        atexit.unregister(_shared.close)
    _shared, _shared_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_after_fork)
