"""What is going on now: plain counters that the pieces of a run add to and anybody may read."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollwright.agents import TIMEOUT, Phase, Session
from rollwright.trajectory import Boundary, ErrorRecord, Trajectory, Turn


@dataclass(frozen=True)
class Elsewhere:
    """What a worker in another process has told of itself."""

    turns: int = 0
    tokens: int = 0
    finished: int = 0
    inflight: int = 0
    waiting_on: Mapping[Phase, int] = field(default_factory=dict)

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any], *, alive: bool) -> "Elsewhere":
        """Out of a heartbeat; a worker that is gone has nothing in flight."""
        return cls(
            turns=int(stats.get("turns", 0)),
            tokens=int(stats.get("tokens", 0)),
            finished=int(stats.get("finished", 0)),
            inflight=int(stats.get("inflight", 0)) if alive else 0,
            waiting_on={phase: int(stats.get(phase, 0)) for phase in Phase} if alive else {},
        )


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
    successes: int = 0
    stale: int = 0
    """Episodes given up because they became too old."""
    withdrawn: int = 0
    """Episodes stopped because nobody needed them any more."""
    refused: int = 0
    """Results that came too late: the attempt did not hold its rollout any more."""
    overdue: int = 0
    """Generations that were not answered in time."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed attempts, by `boundary: kind`."""
    abandoned_envs: int = 0
    """Environments that could not be closed."""
    sessions: dict[str, Session] = field(default_factory=dict)
    """Episodes in flight, by rollout id."""

    elsewhere: dict[str, Elsewhere] = field(default_factory=dict)
    """What workers in other processes have told, by their id."""
    dead_workers: int = 0
    """Worker processes that died and were replaced."""

    @property
    def inflight(self) -> int:
        return len(self.sessions) + sum(each.inflight for each in self.elsewhere.values())

    @property
    def all_turns(self) -> int:
        """Turns of this process and of those that told."""
        return self.turns + sum(each.turns for each in self.elsewhere.values())

    @property
    def all_tokens(self) -> int:
        return self.tokens + sum(each.tokens for each in self.elsewhere.values())

    def waiting_on(self) -> Counter[Phase]:
        """How many episodes wait for what."""
        waiting = Counter(session.phase for session in self.sessions.values())
        for each in self.elsewhere.values():
            waiting.update(each.waiting_on)
        return +waiting

    def heartbeat_stats(self) -> dict[str, int]:
        """What a worker tells the store about itself."""
        stats = {
            "inflight": self.inflight,
            "turns": self.turns,
            "tokens": self.tokens,
            "finished": self.finished,
        }
        return {**stats, **{str(phase): count for phase, count in self.waiting_on().items()}}

    def count(self, turn: Turn) -> None:
        self.turns += 1
        self.tokens += turn.completion_tokens
        self.prompt_tokens += turn.prompt_tokens

    def finish(self, trajectory: Trajectory) -> None:
        self.finished += 1
        self.reward += trajectory.reward
        self.successes += bool(trajectory.success)

    def fail(self, record: ErrorRecord) -> None:
        self.failures[f"{record.boundary}: {record.kind}"] += 1
        if record.boundary is Boundary.ENGINE and record.kind == TIMEOUT:
            self.overdue += 1
