"""Root causes of failures, counted: what went wrong in the words of whatever failed, how often, and one rollout to look at.

Two messages have the same cause when they differ only in what names one case: rollout and request ids, ports, counts,
temporary folders. The status of an HTTP answer is part of the cause. Pure.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_CAUSES = 200
"""Different ones that are kept apart: an exception whose text holds something random must not fill the memory."""

OTHER_CAUSES = "other causes"

TOLD_CAUSES = 20
"""Those that a worker tells with its heartbeat, the most frequent ones: a heartbeat stays small."""

SHOWN = 240
"""Characters of a message that are shown: a sentence or two."""

_TRIES = re.compile(r"\s*\(after \d+ tr(?:y|ies)\)")
_OF_ONE_CASE = re.compile(
    r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"  # a UUID
    r"|\b0x[0-9a-f]+\b"  # an address in memory
    r"|\btmp[0-9a-z_]{6,}\b"  # a temporary folder
    r"|\b(?=[a-z_-]*\d)[0-9a-f]{12,}\b"  # a digest
    r"|(?<!HTTP )(?<!\d)\d+",
    re.IGNORECASE,
)


def root_cause(message: str) -> str:
    """The message in one line, without how often it was tried."""
    line = " ".join(_TRIES.sub("", message).split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}…"


def same_cause(message: str) -> str:
    """Equal for messages of the same cause."""
    return _OF_ONE_CASE.sub("#", root_cause(message))


@dataclass
class Cause:
    """One cause, told by the first message that had it."""

    text: str
    count: int = 0
    example: str = ""
    """Id of a rollout that failed so; empty: not known."""

    def __str__(self) -> str:
        return f"{self.text} (for example {self.example})" if self.example else self.text


@dataclass
class FailureCauses:
    """Failures by cause."""

    _by_cause: dict[str, Cause] = field(default_factory=dict)

    def add(self, message: str, rollout_id: str = "", count: int = 1) -> None:
        key = same_cause(message)
        if key not in self._by_cause and len(self._by_cause) >= MAX_CAUSES:
            key, message = OTHER_CAUSES, OTHER_CAUSES
        found = self._by_cause.setdefault(key, Cause(root_cause(message), example=rollout_id))
        found.count += count

    def update(self, other: "FailureCauses") -> None:
        for each in other.most_common():
            self.add(each.text, each.example, each.count)

    @property
    def total(self) -> int:
        return sum(each.count for each in self._by_cause.values())

    def most_common(self, number: int | None = None) -> list[Cause]:
        """The most frequent first; equally frequent ones as they came."""
        return sorted(self._by_cause.values(), key=lambda each: -each.count)[:number]

    def rows(self, number: int | None = None) -> list[dict[str, Any]]:
        """As plain data."""
        return [
            {"cause": each.text, "count": each.count, "example": each.example}
            for each in self.most_common(number)
        ]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> "FailureCauses":
        """What `rows` gave."""
        found = cls()
        for row in rows:
            found.add(str(row["cause"]), str(row["example"]), int(row["count"]))
        return found
