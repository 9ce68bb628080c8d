"""The store's contract: who plays which rollout, and what came of it.

Always true, of every implementation:
- A rollout has at most one current attempt, and only that attempt can finish it. A late one is refused
  with `AttemptRefused` and changes nothing.
- Every rollout that reaches a final status enters the completion log exactly once.
- Time is the store's own. A lease runs out whether or not anybody calls the store, and a report that comes
  after that moment is refused.
- An attempt in a final status stays in it, and so does a rollout.
- Rollouts are given out by priority, then in the order they came; one that is tried again keeps its place.
  Waiting workers are served in the order they asked.
- Enqueueing an id again changes nothing and returns what is there.
- Nothing that a caller passes in or gets out is shared with the store's own state.
- A store object whose contents or connections are its maker's refuses every call in a fork.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from rollwright.errors import RollwrightError
from rollwright.store.records import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Completion,
    EnqueueRequest,
    Event,
    Page,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    Worker,
    WorkerStatus,
)


class StoreUnavailable(RollwrightError):
    """The store gave no answer, and trying again did not help; whether it took the call is not known."""


class StoreError(RollwrightError):
    """The store refuses a call; nothing was changed."""


class StoreDamaged(StoreError):
    """What the store keeps its data in is damaged, or not a store's; trying again does not help."""


class NotFound(StoreError):
    """No rollout, attempt, worker or resource has that id."""


class AttemptRefused(StoreError):
    """The attempt does not hold the rollout any more: its lease ran out, or the rollout was cancelled."""


class ImpossibleChange(StoreError):
    """The status cannot change that way."""


class Store(ABC):
    """See the module's docstring for what always holds. Unknown ids raise `NotFound` unless stated."""

    instant: ClassVar[bool] = False
    """Whether calls that are not told to wait are done at once, so that making several of them side by side gains
    nothing over one after the other."""
    fork_error: ClassVar[type[RollwrightError]] = StoreError
    """What a call raises in a fork that inherited a store whose contents or connections are its maker's."""

    # -- asking for episodes ------------------------------------------------------------------------

    async def enqueue_rollout(
        self,
        input: Any,
        *,
        rollout_id: str | None = None,
        mode: str | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> Rollout:
        """Puts one rollout in the queue. An id that exists already returns that rollout, unchanged."""
        request = EnqueueRequest(
            input=input,
            rollout_id=rollout_id,
            mode=mode,
            resources_id=resources_id,
            config=config or RolloutConfig(),
            metadata=dict(metadata or {}),
            priority=priority,
        )
        return (await self.enqueue_many_rollouts([request]))[0]

    @abstractmethod
    async def enqueue_many_rollouts(self, requests: Sequence[EnqueueRequest]) -> list[Rollout]:
        """All or none of them, in this order."""

    @abstractmethod
    async def update_rollout(
        self,
        rollout_id: str,
        *,
        status: RolloutStatus | str | None = None,
        mode: str | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        priority: int | None = None,
        reason: str | None = None,
    ) -> Rollout:
        """Changes what is given. `metadata` is laid over what is there; the input never changes.

        A status may be `requeuing` (taken from its worker, to be tried again), `failed` or `cancelled`; the
        others belong to the attempt that holds the rollout. A status it has already changes nothing.
        """

    @abstractmethod
    async def cancel_rollouts(self, rollout_ids: Iterable[str], reason: str) -> list[str]:
        """Withdraws what has not finished; returns the ids that this call cancelled. Their workers are told."""

    # -- playing them -------------------------------------------------------------------------------

    async def dequeue_rollout(
        self, worker_id: str | None = None, *, timeout: float = 0.0, claim_id: str | None = None
    ) -> AttemptedRollout | None:
        """Claims the next rollout; waits up to `timeout` seconds for one, then returns `None`."""
        claimed = await self.dequeue_many_rollouts(1, worker_id, timeout=timeout, claim_id=claim_id)
        return claimed[0] if claimed else None

    @abstractmethod
    async def dequeue_many_rollouts(
        self,
        limit: int = 1,
        worker_id: str | None = None,
        *,
        timeout: float = 0.0,
        claim_id: str | None = None,
    ) -> list[AttemptedRollout]:
        """Claims up to `limit`; waits up to `timeout` seconds for the first one.

        Asking again with the same `claim_id` returns what that claim still holds, so a caller that lost the
        answer can repeat the question.
        """

    @abstractmethod
    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, claim_id: str | None = None
    ) -> AttemptedRollout:
        """Claims one particular rollout that is waiting, out of turn."""

    async def start_rollout(
        self,
        input: Any,
        *,
        rollout_id: str | None = None,
        mode: str | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        worker_id: str | None = None,
        claim_id: str | None = None,
    ) -> AttemptedRollout:
        """A new rollout that is claimed at once and never waits in the queue."""
        request = EnqueueRequest(
            input=input,
            rollout_id=rollout_id,
            mode=mode,
            resources_id=resources_id,
            config=config or RolloutConfig(),
            metadata=dict(metadata or {}),
        )
        return await self.start_requested_rollout(request, worker_id, claim_id=claim_id)

    @abstractmethod
    async def start_requested_rollout(
        self, request: EnqueueRequest, worker_id: str | None = None, *, claim_id: str | None = None
    ) -> AttemptedRollout:
        """`start_rollout` with its arguments in one record. An id that exists already is `start_attempt`."""

    @abstractmethod
    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        *,
        status: AttemptStatus | str | None = None,
        worker_id: str | None = None,
        trajectory: bytes | None = None,
        reason: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Attempt:
        """Reports on an attempt and extends its lease. `attempt_id` may be `latest`.

        A final status decides what becomes of the rollout, by its retry rules; `cancelled` gives it back to be
        tried again, without counting as a try. Repeating a report that was taken already is not an error. The
        trajectory is kept when this attempt ends the rollout. `metadata` is laid over what is there. A
        `worker_id` other than that of the attempt is refused; an attempt without one takes it.
        """

    @abstractmethod
    async def update_worker(
        self,
        worker_id: str,
        *,
        heartbeat_stats: Mapping[str, Any] | None = None,
        attempts: Iterable[tuple[str, str]] | None = None,
    ) -> list[tuple[str, str]]:
        """Heartbeat: extends the leases of the `(rollout_id, attempt_id)` pairs that the worker holds.

        Returns those of them that it does not hold any more and must stop; unknown ones are among them.
        `None` stands for all that it holds. A worker is known from its first heartbeat or claim.
        """

    @abstractmethod
    async def wait_for_cancellations(self, worker_id: str, *, timeout: float) -> list[tuple[str, str]]:
        """The worker's attempts that were taken from it since the last call: cancelled, requeued by a caller,
        too long, or without heartbeats. Waits up to `timeout` for one."""

    # -- the turn journal ---------------------------------------------------------------------------

    @abstractmethod
    async def append_journal(
        self, rollout_id: str, attempt_id: str, entries: Sequence[bytes], *, append_id: str | None = None
    ) -> None:
        """Makes turns durable, in order; counts as a heartbeat. Refused for an attempt that lost the rollout.

        Repeating an attempt's last call with the same `append_id` changes nothing.
        """

    @abstractmethod
    async def read_journal(self, rollout_id: str) -> list[bytes]:
        """What the attempts so far have left for the next one to replay; empty once the rollout is final."""

    @abstractmethod
    async def clear_journal(self, rollout_id: str, attempt_id: str) -> None:
        """Forgets the journal: its replay differed, and the attempt starts anew."""

    # -- results ------------------------------------------------------------------------------------

    @abstractmethod
    async def read_completions(
        self, after: int = 0, *, limit: int = 1000, timeout: float = 0.0
    ) -> list[Completion]:
        """The log of finished rollouts behind cursor `after`; waits up to `timeout` for the first."""

    @abstractmethod
    async def get_trajectories(self, rollout_ids: Sequence[str], *, failed: bool = False) -> dict[str, bytes]:
        """What the successful attempts committed; rollouts without one, or whose one was released, are left out.

        With `failed`, also what the last attempts of failed rollouts left.
        """

    @abstractmethod
    async def release_trajectories(self, rollout_ids: Iterable[str]) -> int:
        """Gives up the store's copies of what successful attempts committed, and returns how many there were.

        For a caller that has them on a disk of its own. All else about the rollouts stays; their space is used again.
        Rollouts that do not exist, have not succeeded or were released before are passed over.
        """

    @abstractmethod
    async def wait_for_rollouts(
        self, rollout_ids: Iterable[str], *, timeout: float | None = None
    ) -> list[Rollout]:
        """Waits until all are final, or the time is up; returns those that are, in the order of the ids."""

    # -- looking ------------------------------------------------------------------------------------

    @abstractmethod
    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None: ...

    @abstractmethod
    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """`None` for a rollout that nobody has tried, and for one that does not exist."""

    @abstractmethod
    async def query_rollouts(
        self,
        *,
        status: RolloutStatus | str | Iterable[RolloutStatus | str] | None = None,
        rollout_ids: Iterable[str] | None = None,
        rollout_id_contains: str | None = None,
        mode: str | None = None,
        sort_by: str = "start_time",
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> Page[Rollout]:
        """`limit=-1` gives all of them, `limit=0` only their number. What has no time or mode comes last."""

    @abstractmethod
    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> Page[Attempt]: ...

    @abstractmethod
    async def query_workers(
        self,
        *,
        status: WorkerStatus | str | Iterable[WorkerStatus | str] | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> Page[Worker]:
        """In the order of their ids."""

    @abstractmethod
    async def get_worker_by_id(self, worker_id: str) -> Worker | None: ...

    @abstractmethod
    async def statistics(self) -> dict[str, int]:
        """Rollouts by status, the numbers of `attempts` and `workers`, and the last cursor of `completions`."""

    @abstractmethod
    async def read_events(self, after: int = 0, *, limit: int = 10_000) -> list[Event]:
        """The store's history behind sequence number `after`, for `rollwright.store.history` to check."""

    # -- settings shared with the workers --------------------------------------------------------------

    @abstractmethod
    async def add_resources(
        self, resources: Mapping[str, Any], *, resources_id: str | None = None
    ) -> ResourcesUpdate:
        """Version 1. An id that exists already is refused, unless its first version says the same."""

    @abstractmethod
    async def update_resources(self, resources_id: str, resources: Mapping[str, Any]) -> ResourcesUpdate:
        """The next version; the same version when nothing is different."""

    @abstractmethod
    async def get_resources_by_id(
        self, resources_id: str, *, version: int | None = None
    ) -> ResourcesUpdate | None: ...

    @abstractmethod
    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """The one added or updated last."""

    @abstractmethod
    async def query_resources(
        self, *, resources_id_contains: str | None = None, limit: int = -1, offset: int = 0
    ) -> Page[ResourcesUpdate]:
        """The newest version of each, in the order of their ids."""

    # -- housekeeping ---------------------------------------------------------------------------------

    @abstractmethod
    async def delete_rollouts(self, rollout_ids: Iterable[str]) -> int:
        """Forgets final rollouts with all that belongs to them, and returns how many.

        Refused if one of them is not final; ids that do not exist are passed over. The events from before the
        oldest rollout that is left go too.
        """

    @abstractmethod
    async def delete_finished(self, *, older_than: float, limit: int = 10_000) -> int:
        """Retention: forgets up to `limit` rollouts that ended more than `older_than` seconds ago."""

    @abstractmethod
    async def close(self) -> None:
        """Gives back what the store holds. Waiting calls end."""
