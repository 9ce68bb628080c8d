"""Waiting without polling: one signal wakes every coroutine that waits for it.

A woken coroutine checks its condition again; a signal carries no data. A coroutine that cannot check without an await
takes the signal's `count` before the check: a signal given since then is not missed. A timeout may be `inf`.
"""

import asyncio
import time
from collections.abc import Callable
from math import inf


class Signal:
    """A condition variable without a lock, for one event loop."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self.count = 0
        """How many times it was notified."""

    def __bool__(self) -> bool:
        """Whether a coroutine waits for it."""
        return bool(self._waiting)

    def notify(self) -> None:
        self.count += 1
        for future in self._waiting:
            resolve(future)
        self._waiting.clear()

    async def wait(self, timeout: float, since: int | None = None) -> None:
        """Until the next `notify` after the count was `since` (`None`: after now), or until the timeout is over."""
        if since is not None and since != self.count:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await wait_until(future, timeout)
        finally:
            self._waiting.discard(future)


class Countdown:
    """Resolves its future when it has been counted down to zero."""

    def __init__(self, left: int) -> None:
        self._left = left
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def count(self) -> None:
        self._left -= 1
        if self._left <= 0:
            resolve(self.future)


class LoopClock:
    """The wall clock at first use, moved on by the running event loop's own clock.

    So it never jumps with the system's time, and a loop with simulated time carries it along.
    """

    def __init__(self) -> None:
        self._time: Callable[[], float] | None = None
        self._offset = 0.0

    def __call__(self) -> float:
        if self._time is None:
            self._time = asyncio.get_running_loop().time
            self._offset = time.time() - self._time()
        return self._offset + self._time()


class Deadline:
    """A point in the loop's time; it may be infinitely far."""

    def __init__(self, seconds: float) -> None:
        self._end = asyncio.get_running_loop().time() + seconds

    def left(self) -> float:
        """Seconds until then, 0 from then on."""
        return max(0.0, self._end - asyncio.get_running_loop().time())


async def wait_until(future: "asyncio.Future[None]", timeout: float) -> None:
    """Waits for the future, which is resolved when the timeout is over: unlike `wait_for`, a result that arrives at the
    last moment is never thrown away."""
    timer = None
    if timeout != inf:
        timer = asyncio.get_running_loop().call_later(timeout, resolve, future)
    try:
        await future
    finally:
        if timer is not None:
            timer.cancel()


def resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
