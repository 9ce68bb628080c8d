"""The scoring process as seen from here.

True of it: there is at most one process, started when first needed and again after it ended; every request
is answered once or fails. A request that was in the process when it died goes to the next one, once:
asking is free of side effects. It serves any number of event loops and threads, because two threads of its
own do the reading and writing and hand over plain futures.
"""

import asyncio
import atexit
import itertools
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import msgspec

from rollwright.envs.base import EnvironmentFailure
from rollwright.envs.scoring.messages import (
    Ask,
    Entry,
    Hello,
    Refusal,
    Reply,
    Request,
    Result,
    Score,
)
from rollwright.errors import ConfigError
from rollwright.sandbox.frames import read_frame, write_frame

SCORE_SECONDS = 5.0
"""For scoring one answer; an honest one takes milliseconds."""

SCORE_MEMORY = 512 << 20
"""Bytes for scoring one answer."""

MAX_ANSWER = 20_000
"""Characters; the longest answers that datasets expect (grids and code outputs) have a few thousand."""

_START_SECONDS = 120.0
"""For a blocking call to wait, where the process may have to start first (about 3 s on an idle machine)."""

_END_SECONDS = 2.0
"""For the process to end after its input has; then it is killed."""

_MAX_SENT = 2
"""Processes that may die with a request in them before the request fails."""

_log = logging.getLogger(__name__)


@dataclass
class _Pending:
    request: Request
    outcome: "Future[Result]" = field(default_factory=Future)
    sent: int = 0
    """How many processes have been given it."""

    def fail(self, error: EnvironmentFailure) -> None:
        if self.outcome.set_running_or_notify_cancel():
            self.outcome.set_exception(error)


@dataclass(frozen=True)
class _Running:
    process: "subprocess.Popen[bytes]"
    outbox: "SimpleQueue[Request | None]" = field(default_factory=SimpleQueue)
    """What is to be written to it; `None` ends its input, and with it the process."""


class ScoringService:
    """Asks the scoring process; `shared` gives the one that everybody uses."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count()
        self._checked: set[bytes] = set()

    def check(self, dataset: str, options: Mapping[str, Any]) -> None:
        """Blocks until it is known that they are accepted; a `ConfigError` says what is wrong."""
        request = self._request(Ask.CHECK, dataset, options)
        try:
            key = msgspec.json.encode((dataset, request.options), order="deterministic")
        except TypeError as error:
            raise ConfigError(f"settings of a dataset must be plain data: {error}") from error
        if key in self._checked:
            return
        try:
            _unless_refused(self._submit(request).result(_START_SECONDS))
        except TimeoutError as error:
            raise EnvironmentFailure(f"no word from the scoring process in {_START_SECONDS:g} s") from error
        self._checked.add(key)

    async def entry(self, dataset: str, options: Mapping[str, Any], seed: int) -> Entry:
        """The question of a seed: the same in every process."""
        result = await self._ask(self._request(Ask.ENTRY, dataset, options, seed=seed))
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
        memory: int = SCORE_MEMORY,
    ) -> Score:
        """What an answer to that question is worth. An answer too long to be one is worth nothing."""
        if len(answer) > MAX_ANSWER:
            return Score(0.0, failed=True)
        request = self._request(
            Ask.SCORE,
            dataset,
            options,
            seed=seed,
            answer=answer.encode(errors="replace").decode(),
            seconds=seconds,
            memory=memory,
        )
        result = await self._ask(request)
        assert isinstance(result, Score)
        return result

    def close(self) -> None:
        """Ends the process; a later call starts a new one."""
        with self._lock:
            running, self._running = self._running, None
            dropped, self._pending = self._pending, {}
        for pending in dropped.values():
            pending.fail(EnvironmentFailure("the scoring process was closed"))
        if running is not None:
            running.outbox.put(None)
            try:
                running.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()

    def _request(self, ask: Ask, dataset: str, options: Mapping[str, Any], **rest: Any) -> Request:
        return Request(next(self._ids), ask, dataset, dict(options), **rest)

    async def _ask(self, request: Request) -> Result:
        return _unless_refused(await asyncio.wrap_future(self._submit(request)))

    def _submit(self, request: Request) -> "Future[Result]":
        pending = _Pending(request)
        with self._lock:
            self._send(pending)
        return pending.outcome

    def _send(self, pending: _Pending) -> None:
        """Call it with the lock held."""
        try:
            self._running = self._running or self._start()
        except OSError as error:
            pending.fail(EnvironmentFailure(f"the scoring process cannot be started: {error}"))
            return
        pending.sent += 1
        self._pending[pending.request.id] = pending
        self._running.outbox.put(pending.request)

    def _start(self) -> _Running:
        process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-m", "rollwright.envs.scoring.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            cwd="/",
            start_new_session=True,
        )
        running = _Running(process)
        for work in (self._write, self._read):
            threading.Thread(target=work, args=(running,), name="scoring", daemon=True).start()
        return running

    def _write(self, running: _Running) -> None:
        requests = running.process.stdin
        assert requests is not None
        with suppress(BrokenPipeError):  # it has died; the reading thread sees that too, and deals with it
            for request in iter(running.outbox.get, None):
                write_frame(requests, request)
        with suppress(BrokenPipeError):
            requests.close()

    def _read(self, running: _Running) -> None:
        assert running.process.stdout is not None
        with running.process.stdout as replies:
            problem = self._greet(read_frame(replies))
            while problem is None and (frame := read_frame(replies)) is not None:
                reply = msgspec.msgpack.decode(frame, type=Reply)
                with self._lock:
                    pending = self._pending.pop(reply.id, None)
                if pending is not None and pending.outcome.set_running_or_notify_cancel():
                    pending.outcome.set_result(reply.result)
        running.outbox.put(None)
        running.process.wait()
        self._after_end(running, problem)

    def _greet(self, frame: bytes | None) -> str | None:
        """Why the process is of no use; `None` when it is."""
        if frame is None:
            return "the scoring process ended before it was ready"
        hello = msgspec.msgpack.decode(frame, type=Hello)
        if hello.error is None and not hello.is_sealed:
            _log.warning(
                "scorers of reasoning-gym that evaluate answers as code are held by resource limits alone: "
                "this system has no system-call filter"
            )
        return hello.error

    def _after_end(self, running: _Running, problem: str | None) -> None:
        with self._lock:
            if self._running is not running:
                return  # closed from this side, which dealt with the requests
            self._running = None
            lost, self._pending = self._pending, {}
            for pending in lost.values():
                if problem is not None:
                    pending.fail(EnvironmentFailure(problem))
                elif pending.sent < _MAX_SENT:
                    self._send(pending)
                else:
                    pending.fail(EnvironmentFailure(f"{pending.sent} scoring processes died over a request"))


def _environment() -> dict[str, str]:
    """All that the process gets to know of this one's environment: where modules are."""
    return {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in sys.path if place),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def _unless_refused(result: Result) -> Result:
    if isinstance(result, Refusal):
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
    """A forked copy of this process has none of its threads, and must not share its pipes."""
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):  # where processes can fork
    os.register_at_fork(after_in_child=_forget_after_fork)
