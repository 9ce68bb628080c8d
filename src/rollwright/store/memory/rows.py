"""The memory store's mutable rows of rollouts, attempts and workers, and their conversion to records.

Rows are changed in place and never leave the store; every query builds a new record, and plain data is kept packed, so
no caller can reach the store's state.
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
    WorkerRecord,
)
from rollwright.store.transitions import worker_status
from rollwright.store.waiting import Countdown


@dataclass(slots=True, eq=False)
class StoredAttempt:
    rollout: "StoredRollout"
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
    """Idempotency key of the last journal append; a repeat is skipped."""

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
class StoredRollout:
    rollout_id: str
    place: int
    """Position in the order of arrival."""
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
    attempts: list[StoredAttempt] = field(default_factory=list)
    current: StoredAttempt | None = None
    """The attempt that holds the rollout."""
    journal: list[bytes] | None = None
    """`None` while empty, like `watchers`: a queue may hold very many rollouts, and an empty list takes 56 bytes."""
    trajectory: bytes | None = None
    cursor: int = 0
    """Position in the completion log; 0 while it is not final."""
    watchers: list[Countdown] | None = None
    """Calls that wait for it to become final."""

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

    def attempted(self, attempt: StoredAttempt) -> AttemptedRollout:
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
class StoredWorker:
    worker_id: str
    last_heartbeat_time: float
    """Time of its last call of any kind."""
    heartbeat_stats: bytes = EMPTY
    last_dequeue_time: float | None = None
    last_busy_time: float | None = None
    last_idle_time: float | None = None
    held: dict[str, StoredAttempt] = field(default_factory=dict)
    """By attempt id, the newest last."""
    taken: dict[tuple[str, str], None] = field(default_factory=dict)
    """Rollout and attempt ids of attempts that others ended, and that the worker was not notified of yet; in order."""

    def record(self, now: float) -> WorkerRecord:
        current = next(reversed(self.held.values()), None)
        return WorkerRecord(
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


class WorkerTable:
    """Every worker's attempts, its last heartbeat, and its attempts that others ended."""

    def __init__(self) -> None:
        self.workers: dict[str, StoredWorker] = {}
        self.to_notify: set[str] = set()
        """Workers with new entries in `taken` since the owner last looked; the owner empties the set."""

    def mark_alive(self, worker_id: str | None, now: float) -> StoredWorker | None:
        """The worker's row, marked as alive; created at its first call."""
        if worker_id is None:
            return None
        worker = self.workers.get(worker_id)
        if worker is None:
            worker = self.workers[worker_id] = StoredWorker(worker_id, now, last_idle_time=now)
        worker.last_heartbeat_time = now
        return worker

    def hold(self, worker: StoredWorker, attempt: StoredAttempt, now: float) -> None:
        attempt.worker_id = worker.worker_id
        worker.held[attempt.attempt_id] = attempt
        worker.last_busy_time = now

    def release(self, attempt: StoredAttempt, now: float, *, taken: bool) -> None:
        """`taken`: the worker did not end it itself, and must be notified."""
        worker = self.workers.get(attempt.worker_id) if attempt.worker_id is not None else None
        if worker is None:
            return
        del worker.held[attempt.attempt_id]
        if not worker.held:
            worker.last_idle_time = now
        if taken:
            worker.taken[attempt.rollout.rollout_id, attempt.attempt_id] = None
            self.to_notify.add(worker.worker_id)

    def forget(self, row: StoredRollout) -> None:
        """Drops pending notifications about a rollout that is deleted."""
        for attempt in row.attempts:
            worker = self.workers.get(attempt.worker_id or "")
            if worker is not None:
                worker.taken.pop((row.rollout_id, attempt.attempt_id), None)

    def take_notifications(self, worker_id: str) -> list[tuple[str, str]]:
        """The attempts that others ended since the worker was last notified."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return []
        taken, worker.taken = worker.taken, {}
        return list(taken)
