"""Attributes each instant of an attempt to exactly one phase.

The rule: an instant belongs to the first phase, in the order of `Phase`, that the attempt waits for then; among waits of one
phase, to the earliest; and to the agent's own code if it waits for nothing. A tool's time is therefore the time in which no
generation of the same episode was running, so that the engine had no work from it.

Invariant: the intervals are ordered, adjacent, and cover the wall time from 0 to its end.
"""

from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from rollwright.trajectory import Phase, Timing, Wait

_PRECEDENCE = {phase: place for place, phase in enumerate(Phase)}


class Interval(NamedTuple):
    """Part of an attempt, in seconds after its start."""

    start: float
    stop: float
    wait: Wait | None
    """Wait that the interval is attributed to; `None` for the agent's own code."""

    @property
    def phase(self) -> Phase:
        return Phase.AGENT if self.wait is None else self.wait.phase


def exclusive(timing: Timing) -> list[Interval]:
    """Intervals of an attempt's wall time, each attributed to one wait or to the agent."""
    waits = timing.waits
    if all(waits[place].stop <= waits[place + 1].start for place in range(len(waits) - 1)):
        return _one_by_one(timing)
    return _sweep(timing)


def _one_by_one(timing: Timing) -> list[Interval]:
    """Fast path for waits that do not overlap, which are most."""
    found: list[Interval] = []
    now = 0.0
    for wait in timing.waits:
        start, stop = max(wait.start, now), min(wait.stop, timing.wall)
        if stop > start:
            if start > now:
                found.append(Interval(now, start, None))
            found.append(Interval(start, stop, wait))
            now = stop
    if timing.wall > now:
        found.append(Interval(now, timing.wall, None))
    return found


def _sweep(timing: Timing) -> list[Interval]:
    """Sweep over the starts and ends of all waits, with the current waits in a heap."""
    waits = sorted(timing.waits, key=lambda wait: wait.start)
    moments = sorted({0.0, timing.wall, *_moments(timing)})
    under_way: list[tuple[int, float, int]] = []
    found: list[Interval] = []
    coming = 0
    for now, then in pairwise(moments):
        while coming < len(waits) and waits[coming].start <= now:
            wait = waits[coming]
            heappush(under_way, (_PRECEDENCE[wait.phase], wait.start, coming))
            coming += 1
        while under_way and waits[under_way[0][2]].stop <= now:
            heappop(under_way)
        owner = waits[under_way[0][2]] if under_way else None
        if found and found[-1].wait is owner:
            found[-1] = Interval(found[-1].start, then, owner)
        else:
            found.append(Interval(now, then, owner))
    return found


def _moments(timing: Timing) -> set[float]:
    ends = {moment for wait in timing.waits for moment in (wait.start, wait.stop)}
    return {moment for moment in ends if 0 < moment < timing.wall}
