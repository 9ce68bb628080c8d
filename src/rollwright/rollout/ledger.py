"""Where opened rollouts are, counted. Each is in exactly one place at a time; two ledgers can be added up."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rollwright.rollout.filters import Catches


class Place(StrEnum):
    """Where an opened rollout is."""

    RUNNING = "running"
    """Queued, being played, or between two attempts."""
    WAITING = "waiting"
    """Finished; its group is not complete, or complete and not handed out yet."""
    DELIVERED = "delivered"
    FILTERED = "filtered"
    """Finished, but its group was left out by a filter or fell below `min_group_size`."""
    STALE = "stale"
    """Finished or given up, but too old to be handed out."""
    CANCELLED = "cancelled"
    """Not needed any more: its group was complete without it, or gone."""
    FAILED = "failed"
    """Its retry rules allowed no further attempt."""


MAX_REASONS = 1000
"""Different ones that are counted: a filter of one's own may give another for each group, and a run may last for months."""

OTHER_REASONS = "other reasons"
"""Where the rest is counted."""

Fate = tuple[Place, str | None]
"""Where a rollout came to, and why if it was left out."""


@dataclass
class Ledger:
    """How many rollouts are in which place, and why those left out were."""

    counts: dict[Place, int] = field(default_factory=lambda: dict.fromkeys(Place, 0))
    reasons: dict[str, int] = field(default_factory=dict)
    """Rollouts that were filtered, stale, cancelled or failed, by `place: reason`."""
    catches: Catches = field(default_factory=Catches)
    """What the filters caught, whatever followed from it."""

    @property
    def opened(self) -> int:
        return sum(self.counts.values())

    def open(self) -> None:
        self.counts[Place.RUNNING] += 1

    def move(self, old: Place, new: Place, reason: str | None = None, count: int = 1) -> None:
        self.counts[old] -= count
        self.counts[new] += count
        if reason is not None and count:
            self._add_reason(f"{new}: {reason}", count)

    def add(self, other: "Ledger") -> None:
        """What stands in another one, on top."""
        for place, count in other.counts.items():
            self.counts[place] += count
        for reason, count in other.reasons.items():
            self._add_reason(reason, count)
        self.catches.add_all(other.catches)

    def _add_reason(self, key: str, count: int) -> None:
        if key not in self.reasons and len(self.reasons) >= MAX_REASONS:
            key = f"{key.partition(':')[0]}: {OTHER_REASONS}"
        self.reasons[key] = self.reasons.get(key, 0) + count

    def row(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "counts": {str(place): count for place, count in self.counts.items()},
            "reasons": dict(self.reasons),
            "catches": {name: [each.count, each.example] for name, each in self.catches.by_filter.items()},
        }

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Ledger":
        """What `row` gave."""
        ledger = cls(reasons={str(reason): int(count) for reason, count in row["reasons"].items()})
        ledger.counts.update({Place(place): int(count) for place, count in row["counts"].items()})
        for name, (count, example) in row["catches"].items():
            ledger.catches.add(name, example, count)
        return ledger
