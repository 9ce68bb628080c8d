"""Counters of a run: the ledger of its rollouts, the causes of its failures, the activity of its processes.

Always true: an opened rollout has exactly one `Fate` in its stream's `Ledger` at a time, and two ledgers can be added
up. Totals of an `Activity` only grow. Two failure messages have the same cause when they differ only in names of one
case: rollout and request ids, ports, counts, temporary folders; the status of an HTTP answer is part of the cause.
"""

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rollwright.agents.failures import TIMEOUT, EpisodeFailure
from rollwright.rollout.filters import Catches
from rollwright.trajectory import Boundary, ErrorRecord, Phase, Trajectory, Turn

if TYPE_CHECKING:
    from rollwright.agents import Session


class Fate(StrEnum):
    """The state of an opened rollout in its stream."""

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
    """No longer needed: its group was complete without it, or dropped."""
    FAILED = "failed"
    """Its retry rules allowed no further attempt."""


MAX_REASONS = 1000
"""Limit of distinct reasons: a user-defined filter may return a new one for each group, and a run may last for months."""

OTHER_REASONS = "other reasons"
"""Reason under which further ones are counted."""

FateReason = tuple[Fate, str | None]
"""A rollout's fate, and the reason if it was left out."""


_NO_COUNTS = dict.fromkeys(Fate, 0)
"""Copied for each ledger: every group has one."""


@dataclass
class Ledger:
    """Number of rollouts by fate, and by the reason for which they were left out."""

    counts: dict[Fate, int] = field(default_factory=_NO_COUNTS.copy)
    reasons: dict[str, int] = field(default_factory=dict)
    """Rollouts that were filtered, stale, cancelled or failed, by `fate: reason`."""
    catches: Catches = field(default_factory=Catches)
    """Catches of the filters, whatever their action."""

    @property
    def opened(self) -> int:
        return sum(self.counts.values())

    def open(self, count: int = 1) -> None:
        self.counts[Fate.RUNNING] += count

    def move(self, old: Fate, new: Fate, reason: str | None = None, count: int = 1) -> None:
        self.counts[old] -= count
        self.counts[new] += count
        if reason is not None and count:
            self._add_reason(f"{new}: {reason}", count)

    def add(self, other: "Ledger") -> None:
        """Adds another ledger's counts to this one."""
        for fate, count in other.counts.items():
            self.counts[fate] += count
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
            "counts": {str(fate): count for fate, count in self.counts.items()},
            "reasons": dict(self.reasons),
            "catches": {name: [each.count, each.example] for name, each in self.catches.by_filter.items()},
        }

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Ledger":
        """Reads a ledger from its `row`."""
        ledger = cls(reasons={str(reason): int(count) for reason, count in row["reasons"].items()})
        ledger.counts.update({Fate(fate): int(count) for fate, count in row["counts"].items()})
        for name, (count, example) in row["catches"].items():
            ledger.catches.add(name, example, count)
        return ledger


MAX_CAUSES = 200
"""Limit of distinct causes: an exception with random text must not fill the memory."""

OTHER_CAUSES = "other causes"

TOLD_CAUSES = 20
"""Number of causes in a heartbeat, the most frequent ones, so that it stays small."""

SHOWN = 240
"""Limit of characters of a message: a sentence or two."""

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
    """The message in one line, without the number of attempts."""
    line = " ".join(_TRIES.sub("", message).split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}…"


def same_cause(message: str) -> str:
    """Normalised message; equal for messages of the same cause."""
    return _OF_ONE_CASE.sub("#", root_cause(message))


@dataclass
class FailureCause:
    """One cause of failures, with the first message that had it."""

    text: str
    count: int = 0
    example: str = ""
    """Id of a rollout with this failure; empty: unknown."""

    def __str__(self) -> str:
        return f"{self.text} (for example {self.example})" if self.example else self.text


@dataclass
class FailureCauses:
    """Failures by cause."""

    _by_cause: dict[str, FailureCause] = field(default_factory=dict)

    def add(self, message: str, rollout_id: str = "", count: int = 1) -> None:
        key = same_cause(message)
        if key not in self._by_cause and len(self._by_cause) >= MAX_CAUSES:
            key, message = OTHER_CAUSES, OTHER_CAUSES
        found = self._by_cause.setdefault(key, FailureCause(root_cause(message), example=rollout_id))
        found.count += count

    def update(self, other: "FailureCauses") -> None:
        for each in other.most_common():
            self.add(each.text, each.example, each.count)

    @property
    def total(self) -> int:
        return sum(each.count for each in self._by_cause.values())

    def most_common(self, number: int | None = None) -> list[FailureCause]:
        """Causes by decreasing frequency; equally frequent ones in order of occurrence."""
        return sorted(self._by_cause.values(), key=lambda each: -each.count)[:number]

    def rows(self, number: int | None = None) -> list[dict[str, Any]]:
        """As plain data."""
        return [
            {"cause": each.text, "count": each.count, "example": each.example}
            for each in self.most_common(number)
        ]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> "FailureCauses":
        """Reads causes from their `rows`."""
        found = cls()
        for row in rows:
            found.add(str(row["cause"]), str(row["example"]), int(row["count"]))
        return found


TOLD_EPISODES = 32
"""Number of episodes in a heartbeat, those that have waited longest."""


def _longest_waits(episodes: Iterable[Mapping[str, Any]], number: int | None) -> list[dict[str, Any]]:
    return [dict(each) for each in sorted(episodes, key=lambda each: -float(each["seconds"]))[:number]]


@dataclass
class Activity:
    """Counters of one process. Totals only grow; `sessions` holds this process's episodes in flight."""

    turns: int = 0
    tokens: int = 0
    """Sampled tokens."""
    prompt_tokens: int = 0
    claimed: int = 0
    """Attempts taken from the store."""
    replayed_turns: int = 0
    """Turns that came from the journal of an earlier attempt instead of the engine."""
    replays_differed: int = 0
    """Journals that were discarded, because the environment behaved differently in the replay."""
    finished: int = 0
    """Episodes played to their end."""
    reward: float = 0.0
    """Task reward, summed over the finished episodes."""
    successes: float = 0
    stale: int = 0
    """Episodes abandoned because they became too stale."""
    withdrawn: int = 0
    """Episodes stopped because they were no longer needed."""
    refused: int = 0
    """Results that came too late: the attempt had lost its rollout."""
    commit_seconds: float = 0.0
    """Seconds spent on commits, summed over attempts; a trajectory cannot hold the time of its own commit."""
    slots_restarted: int = 0
    """Number of times that user code cancelled a task of a worker, which then continued."""
    overdue: int = 0
    """Generations that exceeded their time limit."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed attempts, by `boundary: kind`."""
    causes: FailureCauses = field(default_factory=FailureCauses)
    """Failed attempts by cause."""
    abandoned_envs: int = 0
    """Environments that could not be closed."""
    sessions: dict[str, "Session"] = field(default_factory=dict)
    """Episodes in flight, by rollout id."""

    elsewhere: dict[str, "Activity"] = field(default_factory=dict)
    """Activity of workers in other processes, from their heartbeats, by worker id."""
    told_inflight: int = 0
    """Of a worker elsewhere: episodes in flight at its last heartbeat."""
    told_waiting: Counter[Phase] = field(default_factory=Counter)
    """Of a worker elsewhere: the phases its episodes were in at its last heartbeat."""
    told_episodes: list[dict[str, Any]] = field(default_factory=list)
    """Of a worker elsewhere: its `episodes` at its last heartbeat."""
    dead_workers: int = 0
    """Worker processes that died and were replaced."""

    @property
    def inflight(self) -> int:
        return (
            self.told_inflight + len(self.sessions) + sum(each.inflight for each in self.elsewhere.values())
        )

    def waiting_on(self) -> Counter[Phase]:
        """Number of episodes in each phase."""
        waiting = Counter(session.phase for session in self.sessions.values())
        for each in (self, *self.elsewhere.values()):
            waiting.update(each.told_waiting)
        return +waiting

    def episodes(self, number: int | None = None) -> list[dict[str, Any]]:
        """Episodes in flight with what each waits for and for how long, those that have waited longest first."""
        told = [row for each in (self, *self.elsewhere.values()) for row in each.told_episodes]
        waits = [
            (session.stopwatch.current(), rollout_id, session)
            for rollout_id, session in self.sessions.items()
        ]
        if number is not None:  # a row takes longer than a look at the clock, and there may be 100,000
            waits = heapq.nlargest(number, waits, key=lambda each: each[0].seconds)
        for wait, rollout_id, session in waits:
            trajectory = session.trajectory
            told.append(
                {
                    "rollout_id": rollout_id,
                    "attempt_id": trajectory.attempt_id,
                    "tag": trajectory.tag,
                    "phase": str(wait.phase),
                    "name": wait.name,
                    "agent": wait.agent,
                    "seconds": round(wait.seconds, 3),
                    "age": round(wait.start + wait.seconds, 3),
                    "turns": len(trajectory.turns),
                    "worker": session.stopwatch.worker,
                }
            )
        return _longest_waits(told, number)

    def total(self) -> "Activity":
        """Sum of the counters of this process and of workers in other processes."""
        added = Activity()
        for each in (self, *self.elsewhere.values()):
            for name in COUNTERS:
                setattr(added, name, getattr(added, name) + getattr(each, name))
            added.failures.update(each.failures)
            added.causes.update(each.causes)
        return added

    def heartbeat_stats(self) -> dict[str, Any]:
        """The figures of a worker's heartbeat."""
        waiting = {str(phase): count for phase, count in self.waiting_on().items()}
        counters = {name: getattr(self, name) for name in COUNTERS}
        failed = {"failures": dict(self.failures), "causes": self.causes.rows(TOLD_CAUSES)}
        told = {**counters, **failed, "inflight": self.inflight, **waiting}
        return told | {"episodes": self.episodes(TOLD_EPISODES)}

    @classmethod
    def told(cls, stats: Mapping[str, Any], *, alive: bool) -> "Activity":
        """Reads the counters of a heartbeat; a worker that has ended has nothing in flight."""
        activity = cls()
        for name in COUNTERS:
            setattr(activity, name, stats.get(name, 0))
        activity.failures.update(stats.get("failures", {}))
        activity.causes.update(FailureCauses.of(stats.get("causes", ())))
        if alive:
            activity.told_inflight = int(stats.get("inflight", 0))
            activity.told_waiting = Counter({phase: int(stats.get(phase, 0)) for phase in Phase})
            activity.told_episodes = [dict(each) for each in stats.get("episodes", ())]
        return activity

    def count(self, turn: Turn) -> None:
        self.turns += 1
        self.tokens += turn.completion_tokens
        self.prompt_tokens += turn.prompt_tokens

    def finish(self, trajectory: Trajectory) -> None:
        self.finished += 1
        self.reward += trajectory.reward
        self.successes += trajectory.success_share or 0.0

    def fail(self, record: ErrorRecord, rollout_id: str = "") -> None:
        self.failures[f"{record.boundary}: {record.kind}"] += 1
        self.causes.add(str(EpisodeFailure(record)), rollout_id)
        if record.boundary is Boundary.ENGINE and record.kind == TIMEOUT:
            self.overdue += 1


COUNTERS = tuple(
    each.name for each in fields(Activity) if each.type in (int, float) and each.name != "told_inflight"
)
"""The figures that can be added up over workers."""
