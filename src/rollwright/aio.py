"""Asyncio extensions that every box may use: cancellation, shared timeouts, a virtual clock.

Always true:
- **Cancellation.** `is_cancellation` tells a task that its owner cancelled from a `CancelledError` that foreign code
  (environments, agents, tools, policies) raised by itself. Only the first may end the task silently.
- **Shared timeouts.** All timeouts of one length on one event loop share one timer, so thousands of them cost a dict entry
  each. Equal lengths expire in the order in which they were started, so only the oldest needs the timer. A timeout that is
  still pending at its time expires, as exactly as the event loop's clock is fine.
- **Virtual clock.** On a `VirtualClockLoop` callbacks run as usual; when none is ready, the clock jumps to the next timer
  instead of sleeping. The same program of `asyncio.sleep`, `asyncio.timeout` and `loop.time()` gives the same times on every
  machine. The clock stands still while a thread of the loop's executor works. It does not see sockets, other processes or
  threads of other libraries: a timer that guards such work fires at once, so use a real loop for it.
"""

import asyncio
import concurrent.futures
import selectors
from asyncio import Future
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar, TypeVarTuple

from rollwright.errors import RollwrightError

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


def is_cancellation(error: BaseException) -> bool:
    """Whether the error ends the current task from outside: the task was cancelled, or its coroutine is being closed."""
    if isinstance(error, asyncio.CancelledError):
        task = _current_task()
        return task is None or task.cancelling() > 0
    # Python closes an abandoned coroutine outside of any task; inside a task, the code raised GeneratorExit by itself.
    return isinstance(error, GeneratorExit) and _current_task() is None


def future_safe(error: BaseException) -> BaseException:
    """Return the error, or a `RuntimeError` in its place if a future cannot carry it from a thread to an event loop.

    A future refuses `StopIteration`; a `CancelledError` would look like a cancellation of the waiting task; an error that is
    no `Exception` (`SystemExit`) would end the event loop.
    """
    carried = isinstance(error, Exception) and not isinstance(
        error, StopIteration | concurrent.futures.CancelledError
    )
    return error if carried else RuntimeError(f"{type(error).__name__}: {error}")


async def shielded(call: Awaitable[Result]) -> Result:
    """Await a call to its end, also when this task is cancelled meanwhile; then raise the cancellation."""
    inner = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(inner)
    except asyncio.CancelledError:
        await asyncio.gather(inner, return_exceptions=True)
        raise


def ending(task: "asyncio.Task[Any]") -> "Future[None]":
    """A future that is done when the task is, whatever the task's outcome. Cancelling it leaves the task alone.

    `asyncio.wait` does the same with two coroutines, a set and a counter: a kilobyte for as long as it waits."""
    ended: Future[None] = task.get_loop().create_future()

    def end(_: "asyncio.Task[Any]") -> None:
        if not ended.done():
            ended.set_result(None)

    task.add_done_callback(end)
    return ended


async def together(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Await calls concurrently; return their results in the order of the calls. If one fails, the others are cancelled
    and awaited first."""
    waiting = list(calls)
    if len(waiting) == 1:
        return [await waiting[0]]
    tasks = [asyncio.ensure_future(call) for call in waiting]
    try:
        return await asyncio.gather(*tasks)
    finally:
        if not all(task.done() for task in tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _current_task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


MAX_LENGTHS = 64
"""Queues kept for each event loop: a program uses a handful of lengths. Above this, empty queues are dropped."""

_SAME_MOMENT = 1e-9
"""Seconds; asyncio's event loop also treats times that are closer as equal."""


class Expiring(Protocol):
    """The owner of a timeout; it has at most one pending timeout of each length."""

    def expire(self) -> None:
        """Called when the time is up. Must not raise: other timeouts may be due at the same moment."""
        ...


class TimeoutQueue:
    """The pending timeouts of one length on one event loop."""

    __slots__ = ("_due", "_loop", "_once", "_seconds", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, *, once: bool = False) -> None:
        """`once`: cancel the timer together with the last timeout, because no other of this length will start."""
        self._loop = loop
        self._seconds = seconds
        self._once = once
        self._due: dict[Expiring, float] = {}
        """Pending timeouts and their times by the loop's clock, the earliest first."""
        self._timer: asyncio.TimerHandle | None = None
        """Fires no later than the first timeout is due. It is not moved when that one is cancelled: firing early is harmless."""

    def __len__(self) -> int:
        """The number of pending timeouts."""
        return len(self._due)

    def start(self, owner: Expiring) -> None:
        self._due[owner] = self._loop.time() + self._seconds
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._expire_due)

    def cancel(self, owner: Expiring) -> None:
        """Cancel the owner's timeout; does nothing if it has expired."""
        self._due.pop(owner, None)
        if self._once and not self._due:
            self.stop()

    def stop(self) -> None:
        """Cancel the timer; only while no timeout is pending."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire_due(self) -> None:
        self._timer = None
        now = self._loop.time()
        late: list[tuple[Expiring, float]] = []
        for owner, due in self._due.items():
            if due > now + _SAME_MOMENT:
                self._timer = self._loop.call_later(due - now, self._expire_due)
                break
            late.append((owner, due))
        for owner, due in late:
            if (
                self._due.get(owner) == due
            ):  # otherwise the `expire` of an earlier owner has cancelled or restarted it
                del self._due[owner]
                owner.expire()


_QUEUES: dict[asyncio.AbstractEventLoop, dict[float, TimeoutQueue]] = {}


def timeout_queue(loop: asyncio.AbstractEventLoop, seconds: float) -> TimeoutQueue:
    """The event loop's queue for timeouts of this length. A virtual clock gets queues that leave no idle timer behind,
    because the clock would jump to it."""
    lengths = _QUEUES.get(loop)
    if lengths is None:
        for ended in [each for each in list(_QUEUES) if each.is_closed()]:
            _QUEUES.pop(ended, None)
        lengths = _QUEUES[loop] = {}
    queue = lengths.get(seconds)
    if queue is None:
        if len(lengths) >= MAX_LENGTHS:
            for unused in [length for length, pending in lengths.items() if not pending]:
                lengths.pop(unused).stop()
        queue = lengths[seconds] = TimeoutQueue(loop, seconds, once=getattr(loop, "jumps", False))
    return queue


LONGEST_RUN = float(2**22)
"""Seconds, about 48 days. Near twice that, rounding loses the nanosecond by which asyncio tells timers apart. In practice
only a program that is stuck behind a periodic timer gets so far."""


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which starts at 0."""

    jumps = True
    """Tells code that leaves idle timers behind not to do so here: the clock would jump to them."""

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
        """Waits without a time limit, which would pass at once in virtual time."""
        await super().shutdown_default_executor()


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for file events like any selector, but advances `now` instead of waiting for a timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.threads = 0
        """Calls that are running in threads of the executor."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or (self.threads and timeout > 0):
            return super().select(None)
        events = super().select(0)
        if timeout > 0 and not events:
            self.now += timeout
            if self.now > LONGEST_RUN:
                raise RollwrightError(
                    f"virtual time passed {LONGEST_RUN:.0f} s: a task waits for an event that never comes"
                )
        return events


def run_virtual(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
