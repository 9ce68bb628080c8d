"""What the memory store keeps of a rollout, an attempt and a worker, and how it shows them to callers.

Rows are changed in place and never leave the store; a record is made afresh each time one is asked for, and
plain data is kept packed, so no caller can reach into the store's state.
"""

from dataclasses import dataclass, field

from rollwright.store.checks import EMPTY, unpack
from rollwright.store.records import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    Worker,
)
from rollwright.store.transitions import worker_status
from rollwright.store.waiting import Countdown


@dataclass(slots=True, eq=False)
class AttemptRow:
    rollout: "RolloutRow"
    attempt_id: str
    sequence_id: int
    start_time: float
    worker_id: str | None
    claim_id: str | None
    last_heartbeat_time: float
    lease_expires: float | None
    status: AttemptStatus = AttemptStatus.PREPARING
    end_time: float | None = None
    reason: str | None = None
    metadata: bytes = EMPTY
    last_append_id: str | None = None
    """Of the journal; a repeated one is passed over."""

    def record(self) -> Attempt:
        return Attempt(
            self.rollout.rollout_id,
            self.attempt_id,
            self.sequence_id,
            self.status,
            self.start_time,
            self.end_time,
            self.worker_id,
            self.last_heartbeat_time,
            self.lease_expires,
            self.reason,
            unpack(self.metadata),
        )


@dataclass(slots=True, eq=False)
class RolloutRow:
    rollout_id: str
    place: int
    """In the order of arrival."""
    input: bytes
    start_time: float
    mode: str | None
    resources_id: str | None
    config: RolloutConfig
    metadata: bytes
    priority: int
    status: RolloutStatus = RolloutStatus.QUEUING
    end_time: float | None = None
    tries: int = 0
    """Attempts that count against `max_attempts`."""
    attempts: list[AttemptRow] = field(default_factory=list)
    current: AttemptRow | None = None
    """The attempt that holds the rollout."""
    journal: list[bytes] | None = None
    """`None` while it is empty, as `watchers`: there may be very many rollouts that wait for nothing but a worker."""
    trajectory: bytes | None = None
    cursor: int = 0
    """Its place in the completion log; 0 while it is not final."""
    watchers: list[Countdown] | None = None
    """Who waits for it to become final."""

    def record(self) -> Rollout:
        return Rollout(
            self.rollout_id,
            unpack(self.input),
            self.status,
            self.start_time,
            self.end_time,
            self.mode,
            self.resources_id,
            self.config,
            unpack(self.metadata),
            self.priority,
        )

    def attempted(self, attempt: AttemptRow) -> AttemptedRollout:
        return AttemptedRollout(
            self.rollout_id,
            unpack(self.input),
            self.status,
            self.start_time,
            self.end_time,
            self.mode,
            self.resources_id,
            self.config,
            unpack(self.metadata),
            self.priority,
            attempt=attempt.record(),
        )


@dataclass(slots=True, eq=False)
class WorkerRow:
    worker_id: str
    last_heartbeat_time: float
    """When anything was last heard of it."""
    heartbeat_stats: bytes = EMPTY
    last_dequeue_time: float | None = None
    last_busy_time: float | None = None
    last_idle_time: float | None = None
    held: dict[str, AttemptRow] = field(default_factory=dict)
    """By attempt id, the newest last."""
    taken: dict[tuple[str, str], None] = field(default_factory=dict)
    """Rollout and attempt, of those taken from it that it has not been told of; in order."""

    def record(self, now: float) -> Worker:
        current = next(reversed(self.held.values()), None)
        return Worker(
            self.worker_id,
            worker_status(len(self.held), self.last_heartbeat_time, now),
            unpack(self.heartbeat_stats),
            self.last_heartbeat_time,
            self.last_dequeue_time,
            self.last_busy_time,
            self.last_idle_time,
            current.rollout.rollout_id if current else None,
            current.attempt_id if current else None,
        )
