"""Concurrency of a run: rollouts, and calls at the engine. Pure.

Averages cover the time with at least one running rollout. A pause of all rollouts, while a trainer works or between a crash
and its resume, counts as idle.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class BusySpan(NamedTuple):
    """Start and end of a rollout, in seconds since 1970."""

    start: float
    stop: float


class EngineCall(NamedTuple):
    """Start, end and sampled tokens of one generation."""

    start: float
    stop: float
    tokens: int


QUICKEST = 0.1
"""Fastest share of all tokens, which shows the time per token of an unloaded engine."""


@dataclass(frozen=True)
class Load:
    """Concurrency figures of a run."""

    seconds: float = 0.0
    """Seconds with at least one running rollout."""
    idle: float = 0.0
    """Seconds without a rollout, between the first start and the last end."""
    rollouts: float = 0.0
    """Mean number of running rollouts."""
    most_rollouts: int = 0
    levels: tuple[tuple[int, float], ...] = ()
    """Numbers of concurrent calls at the engine, each with its seconds."""
    stretch: float | None = None
    """Mean time per token over that of the fastest tenth; `None` without tokens."""

    @property
    def calls(self) -> float:
        """Mean number of concurrent calls at the engine."""
        return self._call_seconds / self.seconds if self.seconds else 0.0

    @property
    def most_calls(self) -> int:
        return max((level for level, _ in self.levels), default=0)

    def occupancy(self, slots: int) -> float:
        """Share of an engine's slots that were busy."""
        busy = sum(min(level, slots) * seconds for level, seconds in self.levels)
        return busy / (slots * self.seconds) if self.seconds else 0.0

    def in_line(self, slots: int) -> float:
        """Share of the waiting for the engine that was spent in its queue."""
        queued = sum((level - slots) * seconds for level, seconds in self.levels if level > slots)
        return queued / self._call_seconds if queued else 0.0

    @property
    def seen_quiet(self) -> float:
        """Share of the time with calls in which their number was at most half of its maximum."""
        busy = sum(seconds for level, seconds in self.levels if level)
        quiet = sum(seconds for level, seconds in self.levels if 0 < level <= self.most_calls / 2)
        return quiet / busy if busy else 0.0

    @property
    def _call_seconds(self) -> float:
        return sum(level * seconds for level, seconds in self.levels)


def measure(rollouts: Sequence[BusySpan], calls: Sequence[EngineCall]) -> Load:
    """Sweep over all starts and ends."""
    if not rollouts:
        return Load()
    steps = sorted(
        [(each.start, 1, 0) for each in rollouts]
        + [(each.stop, -1, 0) for each in rollouts]
        + [(each.start, 0, 1) for each in calls]
        + [(each.stop, 0, -1) for each in calls]
    )
    active = idle = rollout_seconds = 0.0
    levels: Counter[int] = Counter()
    playing = calling = most = 0
    before = steps[0][0]
    for moment, rollout, call in steps:
        passed = moment - before
        if playing > 0:
            active += passed
            rollout_seconds += playing * passed
            levels[calling] += passed  # type: ignore[assignment]
        else:
            idle += passed
        playing, calling, before = playing + rollout, calling + call, moment
        most = max(most, playing)
    return Load(
        seconds=active,
        idle=idle,
        rollouts=rollout_seconds / active if active else 0.0,
        most_rollouts=most,
        levels=tuple(sorted(levels.items())),
        stretch=stretch(calls),
    )


def stretch(calls: Iterable[EngineCall]) -> float | None:
    """Mean time per token over that of the fastest tenth; calls are weighted by tokens, because short ones are mostly overhead."""
    paces = sorted(((each.stop - each.start) / each.tokens, each.tokens) for each in calls if each.tokens)
    tokens = sum(weight for _, weight in paces)
    seen = 0
    for pace, weight in paces:
        seen += weight
        if seen >= QUICKEST * tokens:
            mean = sum(each * weight for each, weight in paces) / tokens
            return mean / pace if pace > 0 else None
    return None
