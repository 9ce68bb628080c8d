"""Feeds the capacity finder with what happens, window after window, and sets the gate to what it says."""

import asyncio
from collections.abc import Callable

from rollwright.rollout.activity import Activity
from rollwright.rollout.capacity import CapacityFinder, Window
from rollwright.rollout.gate import Gate

WATCH_SECONDS = 0.25
"""How often the load on the engine is looked at."""


class CapacityWatch:
    def __init__(self, gate: Gate, activity: Activity, maximum: int, pressure: Callable[[], int]) -> None:
        self._gate = gate
        self._activity = activity
        self._finder = CapacityFinder(maximum)
        self._pressure = pressure

    async def run(self) -> None:
        while True:
            self._gate.limit = self._finder.limit
            self._finder.observe(await self._window())

    async def _window(self) -> Window:
        clock, activity = asyncio.get_running_loop().time, self._activity
        started, turns, tokens, pressure = clock(), activity.turns, activity.tokens, self._refusals()
        seen, looks = 0, 0
        while not self._finder.worth_judging(activity.turns - turns) and self._refusals() == pressure:
            await asyncio.sleep(WATCH_SECONDS)
            seen += activity.inflight
            looks += 1
        return Window(
            seconds=max(clock() - started, WATCH_SECONDS),
            turns=activity.turns - turns,
            tokens=activity.tokens - tokens,
            inflight=seen / max(looks, 1),
            pressure=self._refusals() - pressure,
        )

    def _refusals(self) -> int:
        """How often the engine has said so far that it is too much."""
        return self._activity.overdue + self._pressure()
