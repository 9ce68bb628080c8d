"""Questions and scores, as asked for from here: a pool of judges, each in a sandbox of its own.

True of it: every request is answered once or fails. A judge works through its requests in order and replies to each
before it begins the next, so the one in front is the one whose time runs: when that is up the judge is killed, the answer
in front is worth nothing, and those behind it go to another judge. An answer over which a judge dies is tried once more
in another, so that nobody pays for what an earlier answer left behind; asking is free of side effects.

It serves any number of event loops and threads. Whoever asks writes to the judge's line itself; one thread of the
service's own reads the replies, keeps the time and starts judges.
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
from rollwright.envs.scoring.protocol import Entry, JudgeAsk, JudgeRequest, NoQuestion, Result, Score
from rollwright.errors import ConfigError

SCORE_SECONDS = 5.0
"""For scoring one answer; an honest one takes milliseconds."""

SCORE_MEMORY = 512 << 20
"""Bytes for a judge, beyond what it starts with."""

MAX_ANSWER = 20_000
"""Characters; the longest answers that datasets expect (grids and code outputs) have a few thousand."""

_START_SECONDS = 120.0
"""For a blocking call to wait, where the judges may have to start first (about 3 s on an idle machine)."""


class ScoringService:
    """Asks judges; `shared` gives the one that everybody uses."""

    def __init__(self, memory: int = SCORE_MEMORY) -> None:
        allow_unconfined = os.environ.get(UNCONFINED_VARIABLE) == "1"
        self.pool = JudgePool(memory, allow_unconfined=allow_unconfined)
        self._ids = itertools.count()
        self._checked: set[bytes] = set()

    def check(self, dataset: str, options: Mapping[str, Any]) -> None:
        """Blocks until it is known that they are accepted; a `ConfigError` says what is wrong."""
        try:
            key = msgspec.json.encode((dataset, options), order="deterministic")
        except TypeError as error:
            raise ConfigError(f"settings of a dataset must be plain data: {error}") from error
        if key in self._checked:
            return
        try:
            _unless_refused(self._submit(JudgeAsk.CHECK, dataset, options).result(_START_SECONDS))
        except TimeoutError as error:
            raise EnvironmentFailure(f"no word from the scoring process in {_START_SECONDS:g} s") from error
        self._checked.add(key)

    async def entry(self, dataset: str, options: Mapping[str, Any], seed: int) -> Entry:
        """The question of a seed: the same in every process."""
        result = await self._ask(self._submit(JudgeAsk.ENTRY, dataset, options, seed))
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
        """What an answer to that question is worth. An answer too long to be one is worth nothing."""
        if len(answer) > MAX_ANSWER:
            return Score(0.0, failed=True)
        readable = answer.encode(errors="replace").decode()
        result = await self._ask(self._submit(JudgeAsk.SCORE, dataset, options, seed, readable, seconds))
        assert isinstance(result, Score)
        return result

    def close(self) -> None:
        """Ends all judges; a later call starts new ones."""
        self.pool.close()

    def _submit(
        self,
        ask: JudgeAsk,
        dataset: str,
        options: Mapping[str, Any],
        seed: int = 0,
        answer: str = "",
        seconds: float = 0.0,
    ) -> "Future[Result]":
        return self.pool.submit(
            JudgeRequest(next(self._ids), ask, dataset, dict(options), seed, answer, seconds)
        )

    async def _ask(self, outcome: "Future[Result]") -> Result:
        return _unless_refused(await asyncio.wrap_future(outcome))


def _unless_refused(result: Result) -> Result:
    if isinstance(result, NoQuestion):
        raise ConfigError(result.message) if result.is_config else EnvironmentFailure(result.message)
    return result


_shared: ScoringService | None = None
_shared_lock = threading.Lock()


def shared() -> ScoringService:
    """The one service of this process; it ends with it."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = ScoringService()
            atexit.register(_shared.close)
        return _shared


def _forget_after_fork() -> None:
    """A forked copy of this process has none of its threads, and must not share its judges."""
    global _shared, _shared_lock
    if _shared is not None:
        _shared.pool.abandon()
        atexit.unregister(_shared.close)
    _shared, _shared_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):  # where processes can fork
    os.register_at_fork(after_in_child=_forget_after_fork)
