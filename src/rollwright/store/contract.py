"""The store's contract: who plays which rollout, and what came of it.

Always true, of every implementation:
- A rollout has at most one current attempt, and only that attempt can finish it. A late one is refused
  with `AttemptRefused` and changes nothing.
- Every rollout that reaches a final status enters the completion log exactly once.
- Time is the store's own. A lease runs out whether or not anybody calls the store.
- Enqueueing an id again changes nothing and returns what is there.
- Nothing that a caller passes in or gets out is shared with the store's own state.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rollwright.errors import RollwrightError
from rollwright.store.records import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Completion,
    EnqueueRequest,
    Page,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    Worker,
    WorkerStatus,
)


class StoreError(RollwrightError):
    """The store refuses a call; nothing was changed."""


class NotFound(StoreError):
    """No rollout, attempt, worker or resource has that id."""


class AttemptRefused(StoreError):
    """The attempt does not hold the rollout any more: its lease ran out, or the rollout was cancelled."""


class ImpossibleChange(StoreError):
    """The status cannot change that way."""


class Store(ABC):
    """See the module's docstring for what always holds. Unknown ids raise `NotFound` unless stated."""

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
    async def cancel_rollouts(self, rollout_ids: Iterable[str], reason: str) -> list[str]:
        """Withdraws what has not finished; returns the ids that this call cancelled. Their workers are told."""

    # -- playing them -------------------------------------------------------------------------------

    async def dequeue_rollout(
        self, worker_id: str | None = None, *, timeout: float = 0.0
    ) -> AttemptedRollout | None:
        """Claims the next rollout; waits up to `timeout` seconds for one, then returns `None`."""
        claimed = await self.dequeue_many_rollouts(1, worker_id, timeout=timeout)
        return claimed[0] if claimed else None

    @abstractmethod
    async def dequeue_many_rollouts(
        self, limit: int = 1, worker_id: str | None = None, *, timeout: float = 0.0
    ) -> list[AttemptedRollout]:
        """Claims up to `limit`; waits up to `timeout` seconds for the first one."""

    @abstractmethod
    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        """Claims one particular rollout that is waiting, out of turn."""

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

        A final status decides what becomes of the rollout, by its retry rules. Repeating a report that
        was taken already is not an error.
        """

    @abstractmethod
    async def update_worker(
        self,
        worker_id: str,
        *,
        heartbeat_stats: Mapping[str, Any] | None = None,
        attempts: Iterable[tuple[str, str]] = (),
    ) -> list[tuple[str, str]]:
        """Heartbeat: extends the leases of the `(rollout_id, attempt_id)` pairs that the worker holds.

        Returns those of them that it does not hold any more and must stop.
        """

    @abstractmethod
    async def wait_for_cancellations(self, worker_id: str, *, timeout: float) -> list[tuple[str, str]]:
        """The worker's attempts that were cancelled since the last call; waits up to `timeout` for one."""

    # -- the turn journal ---------------------------------------------------------------------------

    @abstractmethod
    async def append_journal(self, rollout_id: str, attempt_id: str, entries: Sequence[bytes]) -> None:
        """Makes turns durable, in order; counts as a heartbeat. Refused for an attempt that lost the rollout."""

    @abstractmethod
    async def read_journal(self, rollout_id: str) -> list[bytes]:
        """What the attempts so far have left for the next one to replay."""

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
    async def get_trajectories(self, rollout_ids: Sequence[str]) -> dict[str, bytes]:
        """What the successful attempts committed; rollouts without one are left out."""

    @abstractmethod
    async def wait_for_rollouts(
        self, rollout_ids: Iterable[str], *, timeout: float | None = None
    ) -> list[Rollout]:
        """Waits until all are final, or the time is up; returns those that are."""

    # -- looking ------------------------------------------------------------------------------------

    @abstractmethod
    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None: ...

    @abstractmethod
    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None: ...

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
    ) -> Page[Rollout]: ...

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
    ) -> Page[Worker]: ...

    @abstractmethod
    async def statistics(self) -> dict[str, int]:
        """Rollouts by status, and the numbers of attempts and workers."""

    # -- settings shared with the workers --------------------------------------------------------------

    @abstractmethod
    async def add_resources(
        self, resources: Mapping[str, Any], *, resources_id: str | None = None
    ) -> ResourcesUpdate: ...

    @abstractmethod
    async def update_resources(self, resources_id: str, resources: Mapping[str, Any]) -> ResourcesUpdate: ...

    @abstractmethod
    async def get_resources_by_id(
        self, resources_id: str, *, version: int | None = None
    ) -> ResourcesUpdate | None: ...

    @abstractmethod
    async def get_latest_resources(self) -> ResourcesUpdate | None: ...

    # -- housekeeping ---------------------------------------------------------------------------------

    @abstractmethod
    async def delete_rollouts(self, rollout_ids: Iterable[str]) -> int:
        """Forgets final rollouts with all that belongs to them; refuses running ones."""

    async def close(self) -> None:
        """Gives back what the store holds. Waiting calls end."""
