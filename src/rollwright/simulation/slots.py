"""A fixed number of slots, handed out first come, first served.

What is true: `running` never exceeds `count`; a slot that is given back goes to the caller that has waited
longest, without ever being free in between; a caller that is cancelled while it waits, or in the very moment
it is served, leaves no trace. While held back, no slot is handed out, and callers wait in their order. Busy
slot-seconds are the exact integral of `running` over the loop's clock.
"""

import asyncio
from collections import OrderedDict

from rollwright.errors import ConfigError


class Slots:
    """Belongs to one event loop: its accounts are kept on that loop's clock."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ConfigError(f"slots: {count} is too few; accepted: 1 or more")
        self.count = count
        self.running = 0
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        """Ordered, so that the first is found and any one is removed in constant time."""
        self._held = False
        self._idle: asyncio.Future[None] | None = None
        """Whoever waits for the last running one to end."""
        self._busy = 0.0
        self._since = 0.0
        """When `running` last changed; `_busy` holds what came before."""

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def acquire(self) -> None:
        loop = asyncio.get_running_loop()
        if self.running < self.count and not self._held:
            self._change(loop.time(), +1)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.pop(turn, None)
            if not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        if not self._hand_over():
            self._change(asyncio.get_running_loop().time(), -1)
            if not self.running and self._idle is not None and not self._idle.done():
                self._idle.set_result(None)

    async def drain(self) -> None:
        """Hands out no slot until `let_go`; returns when none is in use. One caller at a time."""
        self._held = True
        if self.running:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle

    def let_go(self) -> None:
        """Slots are handed out again, first of all to those that wait."""
        self._held = False
        now = asyncio.get_running_loop().time()
        while self.running < self.count and self._hand_over():
            self._change(now, +1)

    def _hand_over(self) -> bool:
        """Gives a slot to the caller that has waited longest, if there is one."""
        while self._waiting and not self._held:
            turn, _ = self._waiting.popitem(last=False)
            if not turn.done():
                turn.set_result(None)
                return True
        return False

    def busy_seconds(self, now: float) -> float:
        """Slot-seconds in use so far, the running ones included."""
        return self._busy + self.running * (now - self._since)

    def _change(self, now: float, by: int) -> None:
        self._busy = self.busy_seconds(now)
        self._since = now
        self.running += by
