"""A fixed number of slots, granted first come, first served.

Always true: `running` never exceeds `count`; a released slot passes to the longest waiting caller without being free in
between; a caller that is cancelled while it waits, or at the moment it is granted a slot, leaks none. While draining no slot
is granted and callers keep their order. Busy slot-seconds are the exact integral of `running` over the loop's clock.
"""

import asyncio
from collections import OrderedDict

from rollwright.errors import ConfigError


class Slots:
    """A fair semaphore that can drain and measures its use. Belongs to one event loop, whose clock it uses."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ConfigError(f"slots: {count} is too few; accepted: 1 or more")
        self.count = count
        self.running = 0
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        """Ordered, so that the first waiter is found and any waiter is removed in constant time."""
        self._draining = False
        self._idle: asyncio.Future[None] | None = None
        """Resolved when the last slot is released, for `drain`."""
        self._busy = 0.0
        self._since = 0.0
        """Time of the last change of `running`; `_busy` covers the time before it."""

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def acquire(self) -> None:
        loop = asyncio.get_running_loop()
        if self.running < self.count and not self._draining:
            self._change(loop.time(), +1)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.pop(turn, None)
            if not turn.cancelled():  # the slot was granted in the same moment: pass it on
                self.release()
            raise

    def release(self) -> None:
        if not self._grant_next():
            self._change(asyncio.get_running_loop().time(), -1)
            if not self.running and self._idle is not None and not self._idle.done():
                self._idle.set_result(None)

    async def drain(self) -> None:
        """Grant no slot until `resume`; return when none is in use. One caller at a time."""
        self._draining = True
        if self.running:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle

    def resume(self) -> None:
        """Grant slots again, waiting callers first."""
        self._draining = False
        now = asyncio.get_running_loop().time()
        while self.running < self.count and self._grant_next():
            self._change(now, +1)

    def _grant_next(self) -> bool:
        """Grant a slot to the longest waiting caller; false: there is none."""
        while self._waiting and not self._draining:
            turn, _ = self._waiting.popitem(last=False)
            if not turn.done():
                turn.set_result(None)
                return True
        return False

    def busy_seconds(self, now: float) -> float:
        """Slot-seconds in use until `now`."""
        return self._busy + self.running * (now - self._since)

    def _change(self, now: float, by: int) -> None:
        self._busy = self.busy_seconds(now)
        self._since = now
        self.running += by
