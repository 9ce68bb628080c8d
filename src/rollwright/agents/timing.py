"""The stopwatch of one attempt: records the phases that it waits for.

Always true: a wait is recorded whichever way it ends; several may be under way at once. Each costs about a microsecond,
because each turn of each episode pays for three.
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
    """Sampled in it; set by the code inside the wait."""
    served: float | None = None
    """Of a generation: seconds that the engine says it took. `None`: it does not say."""
    lined: float = 0.0
    """Seconds of it spent waiting for a lock."""
    in_line_since: float | None = None
    """By the stopwatch's clock; `None`: it is not."""
    start: float = 0.0
    """By the stopwatch's clock."""

    @property
    def phase_now(self) -> Phase:
        """`Phase.LOCK` while it is in line."""
        return self.phase if self.in_line_since is None else Phase.LOCK

    @contextmanager
    def in_line(self) -> Iterator[None]:
        """The time that passes inside is put down to `Phase.LOCK` instead."""
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
    """Starts when it is made."""

    def __init__(self, worker: str = "") -> None:
        self._worker = worker
        self.open: set[Waiting] = set()
        """Waits under way."""
        self.waits: list[Wait] = []
        """In the order in which they ended."""
        self.clock = _clock()
        self._epoch = time.time() if self.clock is time.monotonic else self.clock()
        self.started = self.clock()

    @property
    def phase(self) -> Phase:
        """The phase of the wait under way; of several, the first in the order of `Phase`."""
        phases = [waiting.phase_now for waiting in tuple(self.open)]
        if len(phases) == 1:  # nearly always, and everybody who is in flight is asked with every heartbeat
            return phases[0]
        return min(phases, key=_PRECEDENCE.__getitem__, default=Phase.AGENT)

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
        """Returns the waits so far; one that is still under way, such as a call that was given up, ends now."""
        for waiting in tuple(self.open):
            waiting.__exit__(None, None, None)
        wall = self.clock() - self.started
        return Timing(self._epoch, wall, self._worker, os.getpid(), tuple(self.waits))


def _clock() -> Callable[[], float]:
    """The machine's, except in virtual time.

    Not that of any other event loop: uvloop's counts milliseconds.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # made before its loop runs
        return time.monotonic
    return loop.time if isinstance(loop, VirtualClockLoop) else time.monotonic
