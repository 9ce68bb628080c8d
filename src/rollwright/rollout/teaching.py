"""A task sampler that plays levels again while they teach. Pure.

A group teaches if its members differ: if all or none of them solve the level, no member is better than another. With solve
rate p that happens to a group of n with probability p^n + (1-p)^n, and the expected signal of a level is proportional to
p(1-p). So a level whose estimated solve rate lies in a band is drawn again, with a probability proportional to p(1-p);
the rest of the groups take the next level in order, which keeps looking for levels that teach.

Estimates follow the policy: with each visit, what earlier visits showed counts half as much. A level is never in two groups
at once: the second would be drawn by the same old estimate.

With `largest_group`, a level gets as many members as make it likely to teach, and so few as that allows. The sizes keep to
the budget of tokens that groups of `group_size` would take: what easy choices save, later groups may spend.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, log
from random import Random

from rollwright.rollout.draws import GroupOutcome, TaskChoice
from rollwright.rollout.settings import TaskSamplerConfig

KEPT = 0.5
"""Weight of what earlier visits showed, with each new visit."""
TRIES = 64
"""Draws from the levels in the band until one is accepted. By chance alone one in 10^12 is rejected as often at the edge of
the widest band, p = 0.02; then the next level in order is played."""
MEMORY = 100_000
"""Levels of a tag whose estimates are kept; beyond that the one outside the band that was visited longest ago is
forgotten."""
SAVED_GROUPS = 8
"""Groups' worth of tokens that can be saved up."""


@dataclass
class Estimate:
    """What the visits of a level have shown."""

    solved: float = 0.0
    seen: float = 0.0
    """Members, of which `solved` solved it; both discounted."""
    tokens: float = 0.0
    """Sampled by one member, on average of the last visit."""

    @property
    def rate(self) -> float:
        """Solve rate, half a solved and half an unsolved episode added: it is never 0 or 1."""
        return (self.solved + 0.5) / (self.seen + 1.0)

    def add(self, outcome: GroupOutcome) -> None:
        self.solved = self.solved * KEPT + outcome.solved * outcome.members
        self.seen = self.seen * KEPT + outcome.members
        self.tokens = outcome.tokens / outcome.members


@dataclass
class TagEstimates:
    """Levels of one tag."""

    levels: dict[int, Estimate] = field(default_factory=dict)
    """In the order of their last visits."""
    band: list[int] = field(default_factory=list)
    """Levels in the band that no group plays at the moment."""
    places: dict[int, int] = field(default_factory=dict)
    """Where each of them stands in `band`."""
    tokens: float = 0.0
    """Sampled by one member, on average of all visits."""
    visits: int = 0
    saved: float = 0.0
    """Tokens below the budget of all groups so far."""

    def put(self, level: int) -> None:
        if level not in self.places:
            self.places[level] = len(self.band)
            self.band.append(level)

    def take(self, level: int) -> None:
        place = self.places.pop(level, None)
        if place is None:
            return
        last = self.band.pop()
        if last != level:
            self.band[place] = last
            self.places[last] = place


class Teaching:
    """Draws levels by how much they teach; see the module."""

    def __init__(self, settings: TaskSamplerConfig, group_size: int) -> None:
        self._settings = settings
        self._group_size = group_size
        self._tags: dict[str, TagEstimates] = {}
        self._drawn = self._again = 0

    def choose(self, tag: str, chance: Random) -> TaskChoice:
        known = self._tags.setdefault(tag, TagEstimates())
        level = None if chance.random() < self._settings.explore else self._draw(known, chance)
        self._drawn += 1
        if level is not None:
            self._again += 1
            known.take(level)
        return TaskChoice(level, self._members(known, level))

    def _draw(self, known: TagEstimates, chance: Random) -> int | None:
        """A level of the band with a probability proportional to p(1-p), by rejection."""
        for _ in range(TRIES if known.band else 0):
            level = known.band[int(chance.random() * len(known.band))]
            rate = known.levels[level].rate
            if chance.random() < 4 * rate * (1 - rate):
                return level
        return None

    def observe(self, tag: str, level: int, outcome: GroupOutcome) -> None:
        known = self._tags.setdefault(tag, TagEstimates())
        estimate = known.levels.pop(level, None) or Estimate()
        estimate.add(outcome)
        known.levels[level] = estimate
        known.visits += 1
        known.tokens += (estimate.tokens - known.tokens) / known.visits
        self.release(tag, level)
        if len(known.levels) > MEMORY:
            self._forget_one(known)

    def release(self, tag: str, level: int) -> None:
        known = self._tags.setdefault(tag, TagEstimates())
        estimate = known.levels.get(level)
        if estimate is not None and self._settings.low <= estimate.rate <= self._settings.high:
            known.put(level)
        else:
            known.take(level)

    def _forget_one(self, known: TagEstimates) -> None:
        oldest = next((each for each in known.levels if each not in known.places), next(iter(known.levels)))
        known.take(oldest)
        del known.levels[oldest]

    def _members(self, known: TagEstimates, level: int | None) -> int | None:
        largest = self._settings.largest_group
        if largest is None:
            return None
        wanted, tokens = self._group_size, known.tokens
        if level is not None:
            estimate = known.levels[level]
            wanted = members_to_differ(estimate.rate, self._settings.informative)
            tokens = estimate.tokens
        budget = self._group_size * known.tokens
        members = min(max(wanted, self._settings.smallest_group), largest)
        if tokens > 0:  # else nothing was visited yet
            affordable = int((budget + known.saved) / tokens)
            members = max(min(members, affordable), min(self._settings.smallest_group, self._group_size))
            known.saved = min(known.saved + budget - members * tokens, SAVED_GROUPS * budget)
        else:
            members = self._group_size
        return members

    def figures(self) -> Mapping[str, float]:
        return {
            "drawn_again": self._again / max(self._drawn, 1),
            "levels_in_band": float(sum(len(each.band) for each in self._tags.values())),
            "levels_known": float(sum(len(each.levels) for each in self._tags.values())),
        }


def members_to_differ(rate: float, informative: float) -> int:
    """The fewest members that differ with probability `informative`, if each solves the level with probability `rate`."""
    rarer = min(rate, 1 - rate)
    # p^n + (1-p)^n is at least the larger term, which gives a lower bound to start from.
    members = max(2, ceil(log(1 - informative) / log(1 - rarer)))
    while rate**members + (1 - rate) ** members > 1 - informative:
        members += 1
    return members
