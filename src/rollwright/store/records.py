"""Plain data: what a store keeps. Records are frozen; a change is a new record from the store."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Generic, TypeVar, overload

import msgspec


class RolloutStatus(StrEnum):
    """Where a rollout stands. The last three are final."""

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
    """Withdrawn by whoever asked for it."""


class AttemptStatus(StrEnum):
    """Where one try stands. All but the first two are final."""

    PREPARING = "preparing"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMEOUT = "timeout"
    """Took longer than `timeout_seconds`."""
    UNRESPONSIVE = "unresponsive"
    """Its lease ran out: no heartbeat for `unresponsive_seconds`."""
    CANCELLED = "cancelled"
    """Its rollout was cancelled, or it gave the rollout back unplayed; never counted as a try."""


class WorkerStatus(StrEnum):
    IDLE = "idle"
    BUSY = "busy"
    """Holds at least one attempt."""
    UNKNOWN = "unknown"
    """Has not been heard of for a while."""


class RolloutConfig(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Retry rules of one rollout."""

    timeout_seconds: float | None = None
    """Longest time an attempt may take; `None`: no limit."""
    unresponsive_seconds: float | None = 60.0
    """Length of a lease: an attempt without a heartbeat for so long is given up. `None`: never."""
    max_attempts: int = 3
    retry_condition: tuple[AttemptStatus, ...] = (
        AttemptStatus.FAILED,
        AttemptStatus.TIMEOUT,
        AttemptStatus.UNRESPONSIVE,
    )
    """The ends of an attempt after which the rollout is tried again, up to `max_attempts`. An attempt that
    was given back (`cancelled`) is not one of them: its rollout is always tried again, and it does not count."""


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
    """By the store's clock; `None`: the lease never ends. Of an attempt that has ended: its last lease."""
    reason: str | None = None
    """Why it ended, when it did not succeed."""
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


class Rollout(msgspec.Struct, frozen=True, gc=False):
    """One episode to be played: the durable unit."""

    rollout_id: str
    input: Any
    """What to play, as plain data."""
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
    """Higher is taken first; equal ones in the order they came."""


class AttemptedRollout(Rollout, frozen=True, kw_only=True):
    """A rollout together with the attempt that the caller now holds."""

    attempt: Attempt


class CompletionEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry of the store's append-only log of finished rollouts."""

    cursor: int
    """Its place in the log, from 1; ask for what comes `after` it."""
    rollout_id: str
    attempt_id: str | None
    """The attempt that ended it; `None` when it was cancelled without one."""
    status: RolloutStatus
    reason: str | None = None


class WorkerRecord(msgspec.Struct, frozen=True, gc=False):
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
    """What the event log tells of."""

    ENQUEUED = "enqueued"
    CLAIMED = "claimed"
    """An attempt was given out."""
    ENDED = "ended"
    """An attempt reached a final status, or a waiting rollout was withdrawn; `becomes` says what followed."""
    REFUSED = "refused"
    """A report of an attempt that did not hold its rollout any more."""
    DELETED = "deleted"
    """A rollout was forgotten, with all that belonged to it but its events."""


class Event(msgspec.Struct, frozen=True, gc=False):
    """One entry of the store's history, kept so that what it promises can be checked afterwards."""

    sequence: int
    """Grows along the log. The events of one rollout are in the order in which they happened."""
    time: float
    """By the store's clock."""
    kind: EventKind
    rollout_id: str
    attempt_id: str | None = None
    worker_id: str | None = None
    status: str | None = None
    """The attempt's final status, or the one it reported and was refused."""
    lease_expires: float | None = None
    """Of the attempt: when it would have lost the rollout."""
    becomes: str | None = None
    """The rollout's status after an attempt's end; a final one is its entry in the completion log."""


class EnqueueRequest(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One rollout to enqueue. With an id given by the caller, asking twice enqueues once."""

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
