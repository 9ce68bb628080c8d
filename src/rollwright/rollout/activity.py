"""What is going on now: plain counters that the pieces of a run add to and anybody may read."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rollwright.agents import TIMEOUT, EpisodeFailure, Phase, Session
from rollwright.rollout.causes import TOLD_CAUSES, FailureCauses
from rollwright.trajectory import Boundary, ErrorRecord, Trajectory, Turn


@dataclass
class Activity:
    """One for each process. Totals only grow; `sessions` holds this process's episodes in flight."""

    turns: int = 0
    tokens: int = 0
    """Sampled tokens."""
    prompt_tokens: int = 0
    claimed: int = 0
    """Attempts taken from the store."""
    replayed_turns: int = 0
    """Turns that came from the journal of an earlier attempt instead of the engine."""
    replays_differed: int = 0
    """Journals that were of no use, because the environment did not come the same way again."""
    finished: int = 0
    """Episodes played to their end."""
    reward: float = 0.0
    """Task reward, summed over the finished episodes."""
    successes: float = 0
    stale: int = 0
    """Episodes given up because they became too old."""
    withdrawn: int = 0
    """Episodes stopped because nobody needed them any more."""
    refused: int = 0
    """Results that came too late: the attempt did not hold its rollout any more."""
    commit_seconds: float = 0.0
    """Spent on telling the store how attempts ended, summed over them; a trajectory cannot tell it of itself."""
    slots_restarted: int = 0
    """Times that a task of a worker was cancelled by code that it plays, and went on."""
    overdue: int = 0
    """Generations that were not answered in time."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed attempts, by `boundary: kind`."""
    causes: FailureCauses = field(default_factory=FailureCauses)
    """Failed attempts, by what went wrong."""
    abandoned_envs: int = 0
    """Environments that could not be closed."""
    sessions: dict[str, Session] = field(default_factory=dict)
    """Episodes in flight, by rollout id."""

    elsewhere: dict[str, "Activity"] = field(default_factory=dict)
    """What workers in other processes have told with their heartbeats, by their id."""
    told_inflight: int = 0
    """Of a worker elsewhere: episodes in flight, when it told."""
    told_waiting: Counter[Phase] = field(default_factory=Counter)
    """Of a worker elsewhere: what its episodes waited for, when it told."""
    dead_workers: int = 0
    """Worker processes that died and were replaced."""

    @property
    def inflight(self) -> int:
        return (
            self.told_inflight + len(self.sessions) + sum(each.inflight for each in self.elsewhere.values())
        )

    def waiting_on(self) -> Counter[Phase]:
        """How many episodes wait for what."""
        waiting = Counter(session.phase for session in self.sessions.values())
        for each in (self, *self.elsewhere.values()):
            waiting.update(each.told_waiting)
        return +waiting

    def total(self) -> "Activity":
        """The counters of this process and of those that told, added up."""
        added = Activity()
        for each in (self, *self.elsewhere.values()):
            for name in COUNTERS:
                setattr(added, name, getattr(added, name) + getattr(each, name))
            added.failures.update(each.failures)
            added.causes.update(each.causes)
        return added

    def heartbeat_stats(self) -> dict[str, Any]:
        """What a worker tells the store about itself."""
        waiting = {str(phase): count for phase, count in self.waiting_on().items()}
        counters = {name: getattr(self, name) for name in COUNTERS}
        failed = {"failures": dict(self.failures), "causes": self.causes.rows(TOLD_CAUSES)}
        return {**counters, **failed, "inflight": self.inflight, **waiting}

    @classmethod
    def told(cls, stats: Mapping[str, Any], *, alive: bool) -> "Activity":
        """Out of a heartbeat; a worker that is gone has nothing in flight."""
        activity = cls()
        for name in COUNTERS:
            setattr(activity, name, stats.get(name, 0))
        activity.failures.update(stats.get("failures", {}))
        activity.causes.update(FailureCauses.of(stats.get("causes", ())))
        if alive:
            activity.told_inflight = int(stats.get("inflight", 0))
            activity.told_waiting = Counter({phase: int(stats.get(phase, 0)) for phase in Phase})
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
