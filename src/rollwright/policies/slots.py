"""A fixed number of slots, handed out first come, first served.

What is true: `running` never exceeds `count`; a slot that is given back goes to the caller that has waited
longest, without ever being free in between; a caller that is cancelled while it waits, or in the very moment
it is served, leaves no trace. Busy slot-seconds are the exact integral of `running` over the loop's clock.
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
        self._busy = 0.0
        self._since = 0.0
        """When `running` last changed; `_busy` holds what came before."""

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def acquire(self) -> None:
        loop = asyncio.get_running_loop()
        if self.running < self.count:
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
        while self._waiting:
            turn, _ = self._waiting.popitem(last=False)
            if not turn.done():
                turn.set_result(None)
                return
        self._change(asyncio.get_running_loop().time(), -1)

    def busy_seconds(self, now: float) -> float:
        """Slot-seconds in use so far, the running ones included."""
        return self._busy + self.running * (now - self._since)

    def _change(self, now: float, by: int) -> None:
        self._busy = self.busy_seconds(now)
        self._since = now
        self.running += by
