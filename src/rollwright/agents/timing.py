"""The stopwatch of one attempt: records the phases that it waits for.

Always true: a wait is recorded however it ends; several may be in progress at once. One costs about a microsecond, because
every turn of every episode has three.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import msgspec

from rollwright.aio import VirtualClockLoop
from rollwright.trajectory import Phase, Timing, Wait

_PRECEDENCE = {phase: place for place, phase in enumerate(Phase)}


class Waiting(msgspec.Struct, gc=False, eq=False):
    """`with stopwatch.waiting(…) as waiting:` around one wait."""

    watch: "Stopwatch"
    phase: Phase
    name: str
    agent: str
    tokens: int = 0
    """Number of tokens sampled; set by the code inside the wait."""
    served: float | None = None
    """Seconds of a generation as the engine reports them. `None`: not reported."""
    lined: float = 0.0
    """Seconds spent waiting for a lock."""
    in_line_since: float | None = None
    """Start of the current wait for a lock; `None`: not waiting for one."""
    start: float = 0.0
    """Start of the wait, by the stopwatch's clock."""

    @property
    def phase_now(self) -> Phase:
        """The phase of the wait; `Phase.LOCK` while it waits for a lock."""
        return self.phase if self.in_line_since is None else Phase.LOCK

    @contextmanager
    def in_line(self) -> Iterator[None]:
        """Attributes the time inside to `Phase.LOCK` instead."""
        self.in_line_since = self.watch.clock()
        try:
            yield
        finally:
            self._leave_line(self.watch.clock())

    def __enter__(self) -> Self:
        watch = self.watch
        watch.open.add(self)
        self.start = watch.clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watch, start = self.watch, self.start
        now = watch.clock()
        watch.open.discard(self)
        self._leave_line(now)
        if self.served is not None:
            start = watch.note_before(self, Phase.TRANSPORT, now - start - max(self.served, 0.0))
        elif self.lined > 0:
            start = watch.note_before(self, Phase.LOCK, min(self.lined, now - start))
        watch.waits.append(
            Wait(self.phase, start - watch.started, now - start, self.agent, self.name, self.tokens)
        )

    def _leave_line(self, now: float) -> None:
        if self.in_line_since is not None:
            self.lined += now - self.in_line_since
            self.in_line_since = None


class Stopwatch:
    """Measures the waits of one attempt, from its construction on."""

    def __init__(self, worker: str = "") -> None:
        self._worker = worker
        self.open: set[Waiting] = set()
        """Waits in progress."""
        self.waits: list[Wait] = []
        """Finished waits, in the order in which they ended."""
        self.clock = _clock()
        self._epoch = time.time() if self.clock is time.monotonic else self.clock()
        self.started = self.clock()

    @property
    def phase(self) -> Phase:
        """Phase of the wait in progress; of several, the first in the order of `Phase`."""
        phases = [waiting.phase_now for waiting in tuple(self.open)]
        if len(phases) == 1:  # the usual case; every heartbeat reads the phase of all episodes in flight
            return phases[0]
        return min(phases, key=_PRECEDENCE.__getitem__, default=Phase.AGENT)

    @property
    def worker(self) -> str:
        return self._worker

    def current(self) -> Wait:
        """The wait in progress that counts, as in `phase`; without one, the agent's own code since the last wait ended."""
        now = self.clock()
        waiting = min(
            tuple(self.open), key=lambda each: (_PRECEDENCE[each.phase_now], each.start), default=None
        )
        if waiting is None:
            last = self.waits[-1].stop if self.waits else 0.0
            return Wait(Phase.AGENT, last, now - self.started - last)
        since = waiting.start if waiting.in_line_since is None else waiting.in_line_since
        return Wait(
            waiting.phase_now, since - self.started, now - since, waiting.agent, waiting.name, waiting.tokens
        )

    def waiting(self, phase: Phase, name: str = "", agent: str = "") -> Waiting:
        return Waiting(self, phase, name, agent)

    def note_before(self, waiting: Waiting, phase: Phase, seconds: float) -> float:
        """Records a part of a wait under another phase (transport, or a lock), as one span before it; returns where the
        wait's own part starts."""
        start = waiting.start
        if seconds <= 0:
            return start
        self.waits.append(Wait(phase, start - self.started, seconds, waiting.agent, waiting.name))
        return start + seconds

    def read(self) -> Timing:
        """Returns the waits so far; one still in progress, such as an abandoned call, ends now."""
        for waiting in tuple(self.open):
            waiting.__exit__(None, None, None)
        wall = self.clock() - self.started
        return Timing(self._epoch, wall, self._worker, os.getpid(), tuple(self.waits))


def _clock() -> Callable[[], float]:
    """The monotonic clock, except in virtual time.

    Not the event loop's clock, because uvloop's has a resolution of milliseconds.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # made before its loop runs
        return time.monotonic
    return loop.time if isinstance(loop, VirtualClockLoop) else time.monotonic
