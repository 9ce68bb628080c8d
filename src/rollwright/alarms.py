"""Time limits by the thousand: all that an event loop has of one length share one timer.

Always true: an alarm that is still set when its time is up goes off, as exactly as the event loop's clock is fine. Alarms
of one length come due in the order in which they were set, so only the first of them needs the timer; one that is set
and unset in time costs no more than an entry in a table.
"""

import asyncio
from typing import Protocol

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
