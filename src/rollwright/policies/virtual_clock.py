"""An event loop whose clock jumps instead of sleeping.

What is true: whenever a callback can run it runs, and when none can, the clock goes straight to the next
timer. So any program of `asyncio.sleep`, `asyncio.timeout` and `loop.time()` takes the virtual time that it
says and only the real time that it computes; the same program gives the same times on every machine.

Time stands still while a thread of the loop's executor works, and when no timer is pending the loop really
waits. What it cannot see is work elsewhere (sockets, other processes, threads of a library's own): a timer
that guards such work fires at once. Run those on a real loop.
"""

import asyncio
import selectors
from asyncio import Future
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from rollwright.errors import RollwrightError

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

LONGEST_RUN = float(2**22)
"""Seconds, about 48 days. Near the double of it a nanosecond, by which asyncio tells timers apart, is lost in
rounding. In practice only a program that is stuck behind a periodic timer gets so far."""


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """Starts at time 0."""

    jumps = True
    """For whoever would leave a timer behind that does nothing: the clock goes there."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], Result], *args: *Arguments
    ) -> Future[Result]:
        work = super().run_in_executor(executor, func, *args)
        self._clock.threads += 1
        work.add_done_callback(self._thread_done)
        return work

    def _thread_done(self, _: object) -> None:
        self._clock.threads -= 1

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Really waits: a time limit on the clock that jumps would pass at once."""
        await super().shutdown_default_executor()


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for file events as any selector, except that a wait for a timer moves `now` to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.threads = 0
        """How many calls the executor's threads are working on."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or (self.threads and timeout > 0):
            return super().select(None)
        events = super().select(0)
        if timeout > 0 and not events:
            self.now += timeout
            if self.now > LONGEST_RUN:
                raise RollwrightError(
                    f"virtual time passed {LONGEST_RUN:.0f} s: something waits for what never comes"
                )
        return events


def run_virtual(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
