"""The timer of a tool call, which pauses while the call is queued for a shared resource.

Without the pause, a pool under load would look to the model like a tool that hangs, and to the profile like a slow tool.
Always true: a call's timer is paused as long as any part of the call is queued; calls that wait for the same lease are
paused together.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class QueueObserver(Protocol):
    """Is notified while a call is queued."""

    def in_line(self) -> AbstractContextManager[Any]:
        """A context that is open as long as the call is queued."""
        ...


class CallTimer:
    """Timer of one call."""

    def __init__(self, observer: QueueObserver | None = None) -> None:
        self.limit: asyncio.Timeout | None = None
        """The call's timeout; set when the call starts."""
        self._observer = observer
        self._queued: AbstractContextManager[Any] | None = None
        self._left: float | None = None
        self._pauses = 0

    def pause(self) -> None:
        """Pauses the timer; pauses nest, because parts of a call may be queued at the same time."""
        self._pauses += 1
        if self._pauses > 1:
            return
        if self._observer is not None:
            self._queued = self._observer.in_line()
            self._queued.__enter__()
        limit = self.limit
        if limit is not None and not limit.expired() and (until := limit.when()) is not None:
            self._left = until - asyncio.get_running_loop().time()
            limit.reschedule(None)

    def resume(self) -> None:
        """Ends one pause; after the last one the timer runs with the time that was left."""
        self._pauses -= 1
        if self._pauses:
            return
        if self._queued is not None:
            self._queued.__exit__(None, None, None)
            self._queued = None
        if self.limit is not None and self._left is not None:
            self.limit.reschedule(asyncio.get_running_loop().time() + self._left)
            self._left = None


class SharedTimer:
    """Timer of a task that works for several calls; pauses the timers of all of them."""

    def __init__(self) -> None:
        self._timers: list[CallTimer | SharedTimer] = []
        self._pauses = 0
        self.count = 0
        """Number of calls, including calls without a timer."""

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Adds the current call for the duration of the block."""
        timer = _current.get()
        self.count += 1
        if timer is not None:
            self._timers.append(timer)
            for _ in range(self._pauses):  # the task may be queued already
                timer.pause()
        try:
            yield
        finally:
            self.count -= 1
            if timer is not None:
                self._timers.remove(timer)
                for _ in range(self._pauses):
                    timer.resume()

    def context(self) -> Context:
        """Context for the shared task, in which this timer is the current one."""
        context = copy_context()
        context.run(_current.set, self)
        return context

    def pause(self) -> None:
        """Pauses all calls."""
        self._pauses += 1
        for timer in self._timers:
            timer.pause()

    def resume(self) -> None:
        """Ends one pause of all calls."""
        self._pauses -= 1
        for timer in self._timers:
            timer.resume()


_current: "ContextVar[CallTimer | SharedTimer | None]" = ContextVar("current tool timer", default=None)


@contextmanager
def use_timer(timer: CallTimer) -> Iterator[None]:
    """Makes `timer` the one that `pause_timer` pauses inside the block."""
    token = _current.set(timer)
    try:
        yield
    finally:
        with suppress(ValueError):  # the generator was closed from another task, in another context
            _current.reset(token)


@contextmanager
def attach_limit(limit: asyncio.Timeout) -> Iterator[None]:
    """Attaches a timeout to the current call's timer, so that it pauses with the timer."""
    timer = _current.get()
    if not isinstance(timer, CallTimer):
        timer = CallTimer()
    timer.limit = limit
    try:
        with use_timer(timer):
            yield
    finally:
        timer.limit = None


@contextmanager
def pause_timer() -> Iterator[None]:
    """Pauses the current timer inside the block."""
    timer = _current.get()
    if timer is None:
        yield
        return
    timer.pause()
    try:
        yield
    finally:
        timer.resume()
