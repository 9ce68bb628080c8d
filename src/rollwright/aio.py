"""Who ended a task: its owner, who cancelled it, or the code in it, which raised the same exception by itself.

Foreign code (environments, agents, tools, policies) may raise `CancelledError` of its own: a future that it waited for
was cancelled, a library of its gave up. Nobody has cancelled the task then, and nobody waits for it to end.

Time limits by the thousand: all that an event loop has of one length share one timer.

Always true: an alarm that is still set when its time is up goes off, as exactly as the event loop's clock is fine. Alarms
of one length come due in the order in which they were set, so only the first of them needs the timer; one that is set
and unset in time costs no more than an entry in a table.

An event loop whose clock jumps instead of sleeping.

What is true: whenever a callback can run it runs, and when none can, the clock goes straight to the next
timer. So any program of `asyncio.sleep`, `asyncio.timeout` and `loop.time()` takes the virtual time that it
says and only the real time that it computes; the same program gives the same times on every machine.

Time stands still while a thread of the loop's executor works, and when no timer is pending the loop really
waits. What it cannot see is work elsewhere (sockets, other processes, threads of a library's own): a timer
that guards such work fires at once. Run those on a real loop.

Ctrl-C and SIGTERM, for a whole process.

Always true, once `install` was called: the first signal asks whoever answers for the process at that moment to end it
cleanly; the second, or one that nobody answers, ends it at once. Either way there is no traceback, and the exit code is
128 plus the signal's number. Ending at once is safe: whatever must last is on the disk before anybody relies on it.

The handler is Python's and not the event loop's, so it acts also while code that is played keeps the loop busy.
"""

import asyncio
import concurrent.futures
import os
import selectors
import signal
import threading
from asyncio import Future
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, Protocol, TypeVar, TypeVarTuple

from rollwright.errors import RollwrightError


def is_asked_for(error: BaseException) -> bool:
    """Whether this ends the current task from outside: it was cancelled, or its coroutine is being closed."""
    if isinstance(error, asyncio.CancelledError):
        task = _current_task()
        return task is None or task.cancelling() > 0
    # Whoever drops a coroutine closes it, outside of any task; in a task, the code has raised it by itself.
    return isinstance(error, GeneratorExit) and _current_task() is None


def passable(error: BaseException) -> BaseException:
    """The error as one that a future can carry from a thread to an event loop. `StopIteration` cannot be carried at all,
    the other two would look there as if the waiting task had been cancelled, or end the whole event loop."""
    carried = isinstance(error, Exception) and not isinstance(
        error, StopIteration | concurrent.futures.CancelledError
    )
    return error if carried else RuntimeError(f"{type(error).__name__}: {error}")


def _current_task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


MOST_LENGTHS = 64
"""A program has a handful. If there are more, those of which no alarm is set are forgotten."""

_SAME_MOMENT = 1e-9
"""Seconds: times that are closer are one to asyncio's event loop, too."""


class Alarmed(Protocol):
    """Has at most one alarm of a length set at a time."""

    def expire(self) -> None:
        """The time is up. Must not raise: others may be due at the same moment."""
        ...


class Alarms:
    """Those of one length on one event loop."""

    __slots__ = ("_due", "_loop", "_once", "_seconds", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, *, once: bool = False) -> None:
        """`once`: the timer goes with the last alarm, because no other of this length is going to be set."""
        self._loop = loop
        self._seconds = seconds
        self._once = once
        self._due: dict[Alarmed, float] = {}
        """What is set, and when it is due by the loop's clock: the earliest first."""
        self._timer: asyncio.TimerHandle | None = None
        """Comes no later than the first is due. One that comes when none is set any more has no effect."""

    def __len__(self) -> int:
        """How many are set."""
        return len(self._due)

    def set(self, alarmed: Alarmed) -> None:
        self._due[alarmed] = self._loop.time() + self._seconds
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._go_off)

    def unset(self, alarmed: Alarmed) -> None:
        """Also when it has gone off already."""
        self._due.pop(alarmed, None)
        if self._once and not self._due:
            self.stop()

    def stop(self) -> None:
        """Lets go of the timer while no alarm is set."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go_off(self) -> None:
        self._timer = None
        now = self._loop.time()
        late: list[tuple[Alarmed, float]] = []
        for alarmed, due in self._due.items():
            if due > now + _SAME_MOMENT:
                self._timer = self._loop.call_later(due - now, self._go_off)
                break
            late.append((alarmed, due))
        for alarmed, due in late:
            if self._due.get(alarmed) == due:  # else one that went off before it has unset it
                del self._due[alarmed]
                alarmed.expire()


_LOOPS: dict[asyncio.AbstractEventLoop, dict[float, Alarms]] = {}


def alarms_of(loop: asyncio.AbstractEventLoop, seconds: float) -> Alarms:
    """The alarms of this length. On an event loop whose clock `jumps` no timer is left behind, because the clock would
    jump to it."""
    lengths = _LOOPS.get(loop)
    if lengths is None:
        for ended in [each for each in list(_LOOPS) if each.is_closed()]:
            _LOOPS.pop(ended, None)
        lengths = _LOOPS[loop] = {}
    alarms = lengths.get(seconds)
    if alarms is None:
        if len(lengths) >= MOST_LENGTHS:
            for unused in [length for length, set_now in lengths.items() if not set_now]:
                lengths.pop(unused).stop()
        alarms = lengths[seconds] = Alarms(loop, seconds, once=getattr(loop, "jumps", False))
    return alarms


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


ANSWERED = (signal.SIGINT, signal.SIGTERM)

_SHOW_CURSOR = b"\x1b[?25h"
"""A live view hides it."""


class Interrupted(BaseException):
    """A signal has ended what was running, cleanly. Not a `KeyboardInterrupt`, which a command line parser swallows."""


class Interrupts:
    """What has come of a process's signals."""

    def __init__(self) -> None:
        self.installed = False
        self.received: int | None = None
        """The first signal that asked the process to end; `None`: none has."""
        self._answer: Callable[[], object] | None = None

    def install(self) -> None:
        """From now on; only in the main thread."""
        for each in ANSWERED:
            signal.signal(each, self._handle)
        self.installed = True

    @contextmanager
    def installed_meanwhile(self) -> Iterator[None]:
        """Inside, signals are handled so, where they are not yet and this is the main thread; as before, afterwards."""
        if self.installed or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.getsignal(each) for each in ANSWERED}
        self.install()
        try:
            yield
        finally:
            self.installed, self.received = False, None
            for each, handler in before.items():
                signal.signal(each, handler)

    @contextmanager
    def answered_by(self, answer: Callable[[], object]) -> Iterator[None]:
        """Inside, the first signal calls `answer`, which must not take long and must not raise."""
        before, self._answer = self._answer, answer
        try:
            yield
        finally:
            self._answer = before if self.received is None else None

    @property
    def exit_code(self) -> int:
        """Of a process that ended because of a signal."""
        return 128 + (self.received or signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        answer, self._answer = self._answer, None
        if answer is None or self.received is not None:
            self.received = number
            self.leave()
        self.received = number
        answer()

    def leave(self) -> NoReturn:
        """Ends the process now, with one line."""
        word = b"terminated" if self.received == signal.SIGTERM else b"interrupted"
        with suppress(OSError):
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)
        with suppress(OSError):
            os.write(2, word + b"\n")
        os._exit(self.exit_code)


INTERRUPTS = Interrupts()
"""A process has one."""
