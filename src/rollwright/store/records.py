"""The data types of the store: rollouts, attempts, workers and log entries. All are frozen; a change makes a new one."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Generic, TypeVar, overload

import msgspec


class RolloutStatus(StrEnum):
    """Status of a rollout. The last three are final."""

    QUEUING = "queuing"
    """Waiting for its first worker."""
    PREPARING = "preparing"
    """Claimed by a worker that has not reported a turn yet."""
    RUNNING = "running"
    """Its current attempt has reported that it runs, or journalled a turn."""
    REQUEUING = "requeuing"
    """An attempt ended without a result; waiting for another worker."""
    SUCCEEDED = "succeeded"
    """One attempt committed a trajectory."""
    FAILED = "failed"
    """Its retry rules allow no further attempt."""
    CANCELLED = "cancelled"
    """Cancelled by a caller."""


class AttemptStatus(StrEnum):
    """Status of an attempt. All but the first two are final."""

    PREPARING = "preparing"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMEOUT = "timeout"
    """Took longer than `timeout_seconds`."""
    UNRESPONSIVE = "unresponsive"
    """Its lease expired: no heartbeat for `unresponsive_seconds`."""
    CANCELLED = "cancelled"
    """Its rollout was cancelled, or its worker gave the rollout back; never counted as a try."""


class WorkerStatus(StrEnum):
    IDLE = "idle"
    BUSY = "busy"
    """Holds at least one attempt."""
    UNKNOWN = "unknown"
    """Sent no heartbeat for a while."""


class RolloutConfig(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Retry rules of one rollout."""

    timeout_seconds: float | None = None
    """Longest time an attempt may take; `None`: no limit."""
    unresponsive_seconds: float | None = 60.0
    """Length of a lease: an attempt without a heartbeat for so long is ended. `None`: never."""
    max_attempts: int = 3
    retry_condition: tuple[AttemptStatus, ...] = (
        AttemptStatus.FAILED,
        AttemptStatus.TIMEOUT,
        AttemptStatus.UNRESPONSIVE,
    )
    """Final statuses of an attempt after which the rollout is retried, up to `max_attempts`. `cancelled` (given back) is
    not one of them: such a rollout is always retried, and the attempt does not count."""


class Attempt(msgspec.Struct, frozen=True, gc=False):
    """One try at a rollout by one worker. Its id is the fencing token: only the current one may commit."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    """1 for the first try."""
    status: AttemptStatus
    start_time: float
    end_time: float | None = None
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    lease_expires: float | None = None
    """By the store's clock; `None`: the lease never expires. For an attempt that has ended, its last lease."""
    reason: str | None = None
    """Why it did not succeed."""
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


class Rollout(msgspec.Struct, frozen=True, gc=False):
    """One episode to be played: the durable unit."""

    rollout_id: str
    input: Any
    """The task, as plain data."""
    status: RolloutStatus
    start_time: float
    """When it was enqueued, by the store's clock."""
    end_time: float | None = None
    mode: str | None = None
    """`train`, `val` or `test`."""
    resources_id: str | None = None
    config: RolloutConfig = msgspec.field(default_factory=RolloutConfig)
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    priority: int = 0
    """Higher is claimed first; equal priorities in the order of arrival."""


class AttemptedRollout(Rollout, frozen=True, kw_only=True):
    """A rollout together with the attempt that the caller now holds."""

    attempt: Attempt


class CompletionEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry of the store's append-only log of finished rollouts."""

    cursor: int
    """Position in the log, from 1; `read_completions` takes it as `after`."""
    rollout_id: str
    attempt_id: str | None
    """The attempt that ended it; `None` when it was cancelled without one."""
    status: RolloutStatus
    reason: str | None = None


class WorkerRecord(msgspec.Struct, frozen=True, gc=False):
    """A worker as the store knows it, from its claims and heartbeats."""

    worker_id: str
    status: WorkerStatus
    heartbeat_stats: dict[str, Any] = msgspec.field(default_factory=dict)
    last_heartbeat_time: float | None = None
    last_dequeue_time: float | None = None
    last_busy_time: float | None = None
    last_idle_time: float | None = None
    current_rollout_id: str | None = None
    current_attempt_id: str | None = None


class ResourcesUpdate(msgspec.Struct, frozen=True, gc=False):
    """Named settings that rollouts refer to, such as a run's configuration. Old versions are kept."""

    resources_id: str
    version: int
    create_time: float
    update_time: float
    resources: dict[str, Any]


class EventKind(StrEnum):
    """Kind of an entry in the event log."""

    ENQUEUED = "enqueued"
    CLAIMED = "claimed"
    """An attempt was created for a worker."""
    ENDED = "ended"
    """An attempt reached a final status, or a waiting rollout was cancelled; `becomes` is the rollout's next status."""
    REFUSED = "refused"
    """A report was rejected: its attempt did not hold the rollout any more."""
    DELETED = "deleted"
    """A rollout was deleted, with all that belonged to it but its events."""


class Event(msgspec.Struct, frozen=True, gc=False):
    """One entry of the event log, kept so that the store's invariants can be checked afterwards."""

    sequence: int
    """Grows along the log. The events of one rollout are in the order in which they happened."""
    time: float
    """By the store's clock."""
    kind: EventKind
    rollout_id: str
    attempt_id: str | None = None
    worker_id: str | None = None
    status: str | None = None
    """The attempt's final status, or the status of a rejected report."""
    lease_expires: float | None = None
    """Expiry of the attempt's lease."""
    becomes: str | None = None
    """The rollout's status after an attempt's end; a final one is its entry in the completion log."""


class EnqueueRequest(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One rollout to enqueue. With an id given by the caller, a repeat enqueues nothing."""

    input: Any
    rollout_id: str | None = None
    mode: str | None = None
    resources_id: str | None = None
    config: RolloutConfig = msgspec.field(default_factory=RolloutConfig)
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    priority: int = 0


Item = TypeVar("Item")


class Page(msgspec.Struct, Generic[Item], frozen=True):
    """One page of a query: a sequence, with the number of all matches beside it.

    Over HTTP it may hold fewer items than there are and than were asked for; the next page begins behind its last item.
    """

    items: list[Item]
    total: int
    limit: int = -1
    offset: int = 0

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def __repr__(self) -> str:
        return f"Page({len(self.items)} of {self.total} from {self.offset})"
