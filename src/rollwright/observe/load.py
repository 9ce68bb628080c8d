"""How much was under way at once: rollouts, and calls at the engine. Pure.

Counted over the time in which any rollout was under way. A pause of all of them, as while a trainer works or between a
crash and its `resume`, is nobody's wait and counts as idle.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class BusySpan(NamedTuple):
    """Something that was under way, in seconds since 1970."""

    start: float
    stop: float


class Call(NamedTuple):
    """One generation."""

    start: float
    stop: float
    tokens: int


QUICKEST = 0.1
"""The share of all tokens, made the quickest, that shows what a token takes without others in the way."""


@dataclass(frozen=True)
class Load:
    seconds: float = 0.0
    """In which any rollout was under way."""
    idle: float = 0.0
    """Between the first rollout's start and the last one's end, without any."""
    rollouts: float = 0.0
    """Under way, in the mean."""
    most_rollouts: int = 0
    levels: tuple[tuple[int, float], ...] = ()
    """Calls at the engine at once, and for how many seconds."""
    stretch: float | None = None
    """How many times as long a token took as one of the quickest tenth; `None` without tokens."""

    @property
    def calls(self) -> float:
        """At the engine, in the mean."""
        return self._call_seconds / self.seconds if self.seconds else 0.0

    @property
    def most_calls(self) -> int:
        return max((level for level, _ in self.levels), default=0)

    def occupancy(self, slots: int) -> float:
        """The share of an engine's slots that were busy."""
        busy = sum(min(level, slots) * seconds for level, seconds in self.levels)
        return busy / (slots * self.seconds) if self.seconds else 0.0

    def in_line(self, slots: int) -> float:
        """The share of all waiting for the engine that was spent in its line."""
        queued = sum((level - slots) * seconds for level, seconds in self.levels if level > slots)
        return queued / self._call_seconds if queued else 0.0

    @property
    def seen_quiet(self) -> float:
        """The share of the time with calls in which they were at most half as many as at most."""
        busy = sum(seconds for level, seconds in self.levels if level)
        quiet = sum(seconds for level, seconds in self.levels if 0 < level <= self.most_calls / 2)
        return quiet / busy if busy else 0.0

    @property
    def _call_seconds(self) -> float:
        return sum(level * seconds for level, seconds in self.levels)


def measure(rollouts: Sequence[BusySpan], calls: Sequence[Call]) -> Load:
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


def stretch(calls: Iterable[Call]) -> float | None:
    """Weighs calls by their tokens, so that short ones, which are mostly fixed cost, do not decide."""
    paces = sorted(((each.stop - each.start) / each.tokens, each.tokens) for each in calls if each.tokens)
    tokens = sum(weight for _, weight in paces)
    seen = 0
    for pace, weight in paces:
        seen += weight
        if seen >= QUICKEST * tokens:
            mean = sum(each * weight for each, weight in paces) / tokens
            return mean / pace if pace > 0 else None
    return None
