"""The store's API: leases of rollouts to workers, and their results.

Always true, of every backend:
- A rollout has at most one current attempt, and only that attempt can finish it. A late report is rejected with
  `AttemptRefused` and changes nothing.
- Every rollout that reaches a final status enters the completion log exactly once.
- Time is the store's own. A lease expires whether or not anybody calls the store, and a report that arrives after that
  moment is rejected.
- An attempt in a final status stays in it, and so does a rollout.
- Rollouts are claimed by priority, then in the order of arrival; a rollout that is retried keeps its place. Waiting
  workers are served in the order in which they asked.
- Enqueueing an id again changes nothing and returns the rollout that exists.
- Nothing that a caller passes in or gets back is shared with the store's own state.
- A store object with contents or connections of its process rejects every call in a fork.

Each method builds one record of `rollwright.store.calls` and executes it. A backend implements `execute`: the memory
and the SQL store look up the record's handler in a table (`backend.py`), the HTTP client sends the record to a server.
"""

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from math import inf
from typing import Any, ClassVar, Literal

from rollwright.errors import RollwrightError
from rollwright.store import calls
from rollwright.store.call_kinds import Result, StoreCall
from rollwright.store.checks import parse_status, parse_statuses
from rollwright.store.errors import StoreError
from rollwright.store.records import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    CompletionEntry,
    EnqueueRequest,
    Event,
    Page,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    WorkerRecord,
    WorkerStatus,
)


class Store(ABC):
    """See the module's docstring for the invariants. Unknown ids raise `NotFound` unless stated."""

    instant: ClassVar[bool] = False
    """Whether a call without a timeout never yields to other tasks for long, so that concurrent calls gain nothing over
    one after the other."""
    fork_error: ClassVar[type[RollwrightError]] = StoreError
    """Raised by calls in a fork that inherited a store with contents or connections of its parent."""

    @abstractmethod
    def execute(self, call: StoreCall[Result]) -> Coroutine[Any, Any, Result]:
        """Executes one call. The methods below build the record; a server executes records that it received."""

    @abstractmethod
    async def close(self) -> None:
        """Releases the store's resources. Waiting calls end."""

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
        return (await self.execute(calls.EnqueueManyRollouts([request])))[0]

    async def enqueue_many_rollouts(self, requests: Sequence[EnqueueRequest]) -> list[Rollout]:
        """Enqueues all or none of the requests, in this order."""
        return await self.execute(calls.EnqueueManyRollouts(list(requests)))

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
        """Changes the given fields. `metadata` is merged into the existing keys; the input never changes.

        `status` may be `requeuing` (taken from its worker, to be retried), `failed` or `cancelled`; the others belong
        to the attempt that holds the rollout. A status that the rollout already has changes nothing.
        """
        call = calls.UpdateRollout(
            rollout_id,
            None if status is None else parse_status(RolloutStatus, status),
            mode,
            resources_id,
            config,
            None if metadata is None else dict(metadata),
            priority,
            reason,
        )
        return await self.execute(call)

    async def cancel_rollouts(self, rollout_ids: Iterable[str], reason: str) -> list[str]:
        """Cancels the rollouts that are not final; returns the ids that this call cancelled. Their workers are notified."""
        return await self.execute(calls.CancelRollouts(list(rollout_ids), reason))

    # -- playing them -------------------------------------------------------------------------------

    async def dequeue_rollout(
        self, worker_id: str | None = None, *, timeout: float = 0.0, claim_id: str | None = None
    ) -> AttemptedRollout | None:
        """Claims the next rollout; waits up to `timeout` seconds for one, then returns `None`."""
        claimed = await self.execute(
            calls.DequeueManyRollouts(1, timeout, worker_id=worker_id, claim_id=claim_id)
        )
        return claimed[0] if claimed else None

    async def dequeue_many_rollouts(
        self,
        limit: int = 1,
        worker_id: str | None = None,
        *,
        timeout: float = 0.0,
        claim_id: str | None = None,
    ) -> list[AttemptedRollout]:
        """Claims up to `limit`; waits up to `timeout` seconds for the first one.

        A repeat with the same `claim_id` returns the attempts that the claim still holds, so a caller that lost the
        reply can repeat the call.
        """
        return await self.execute(
            calls.DequeueManyRollouts(limit, timeout, worker_id=worker_id, claim_id=claim_id)
        )

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, claim_id: str | None = None
    ) -> AttemptedRollout:
        """Claims one particular waiting rollout, out of turn."""
        call = calls.StartAttempt(rollout_id, worker_id=worker_id, claim_id=claim_id)
        return await self.execute(call)

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
        """Enqueues a rollout and claims it at once, so that it never waits in the queue."""
        request = EnqueueRequest(
            input=input,
            rollout_id=rollout_id,
            mode=mode,
            resources_id=resources_id,
            config=config or RolloutConfig(),
            metadata=dict(metadata or {}),
        )
        call = calls.StartRequestedRollout(request, worker_id=worker_id, claim_id=claim_id)
        return await self.execute(call)

    async def start_requested_rollout(
        self, request: EnqueueRequest, worker_id: str | None = None, *, claim_id: str | None = None
    ) -> AttemptedRollout:
        """`start_rollout` with its arguments in one record. For an id that exists already this is `start_attempt`."""
        call = calls.StartRequestedRollout(request, worker_id=worker_id, claim_id=claim_id)
        return await self.execute(call)

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

        A final status decides the rollout's next status, by its retry rules; `cancelled` gives the rollout back to be
        retried, without counting as a try. Repeating an accepted report is not an error. The trajectory is kept when
        this attempt ends the rollout. `metadata` is merged into the existing keys. A `worker_id` other than the
        attempt's is rejected; an attempt without one adopts it.
        """
        call = calls.UpdateAttempt(
            rollout_id,
            attempt_id,
            None if status is None else parse_status(AttemptStatus, status),
            worker_id,
            trajectory,
            reason,
            None if metadata is None else dict(metadata),
        )
        return await self.execute(call)

    async def finish_and_dequeue(
        self,
        rollout_id: str,
        attempt_id: str,
        *,
        status: AttemptStatus | str,
        worker_id: str | None = None,
        trajectory: bytes | None = None,
        reason: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        claim_id: str | None = None,
    ) -> list[AttemptedRollout]:
        """Ends an attempt and claims the worker's next rollout, in one transaction: `update_attempt` with a final status,
        then `dequeue_rollout` without waiting.

        The list is empty if no rollout waits. A report that is rejected raises as it does from `update_attempt`, and then
        nothing is claimed. A repeat with the same `claim_id` returns the attempt that the claim still holds.
        """
        call = calls.FinishAndDequeue(
            rollout_id,
            attempt_id,
            parse_status(AttemptStatus, status),
            trajectory,
            reason,
            None if metadata is None else dict(metadata),
            worker_id=worker_id,
            claim_id=claim_id,
        )
        return await self.execute(call)

    async def update_worker(
        self,
        worker_id: str,
        *,
        heartbeat_stats: Mapping[str, Any] | None = None,
        attempts: Iterable[tuple[str, str]] | None = None,
    ) -> list[tuple[str, str]]:
        """Heartbeat: extends the leases of the `(rollout_id, attempt_id)` pairs that the worker holds.

        Returns the pairs that the worker does not hold any more and must stop, unknown ones included. `None` stands
        for all that it holds. A worker exists from its first heartbeat or claim.
        """
        call = calls.UpdateWorker(
            worker_id,
            None if heartbeat_stats is None else dict(heartbeat_stats),
            None if attempts is None else list(attempts),
        )
        return await self.execute(call)

    async def wait_for_cancellations(self, worker_id: str, *, timeout: float) -> list[tuple[str, str]]:
        """The worker's attempts that were ended by others since the last call: cancelled, requeued by a caller, timed out,
        or without heartbeats. Waits up to `timeout` seconds for one."""
        return await self.execute(calls.WaitForCancellations(worker_id, timeout))

    # -- the turn journal ---------------------------------------------------------------------------

    async def append_journal(
        self, rollout_id: str, attempt_id: str, entries: Sequence[bytes], *, append_id: str | None = None
    ) -> None:
        """Makes turns durable, in order; counts as a heartbeat. Rejected for an attempt that lost the rollout.

        Repeating an attempt's last call with the same `append_id` changes nothing.
        """
        await self.execute(calls.AppendJournal(rollout_id, attempt_id, list(entries), append_id))

    async def read_journal(self, rollout_id: str) -> list[bytes]:
        """The turns of earlier attempts for the next one to replay; empty once the rollout is final."""
        return await self.execute(calls.ReadJournal(rollout_id))

    async def clear_journal(self, rollout_id: str, attempt_id: str) -> None:
        """Deletes the journal: its replay diverged, and the attempt starts over."""
        await self.execute(calls.ClearJournal(rollout_id, attempt_id))

    # -- results ------------------------------------------------------------------------------------

    async def read_completions(
        self, after: int = 0, *, limit: int = 1000, timeout: float = 0.0
    ) -> list[CompletionEntry]:
        """The log of finished rollouts behind cursor `after`; waits up to `timeout` seconds for the first."""
        return await self.execute(calls.ReadCompletions(timeout, after=after, limit=limit))

    async def get_trajectories(self, rollout_ids: Sequence[str], *, failed: bool = False) -> dict[str, bytes]:
        """The trajectories of successful attempts; rollouts without one, or with a released one, are left out.

        With `failed`, also the trajectories of the last attempts of failed rollouts.
        """
        return await self.execute(calls.GetTrajectories(list(rollout_ids), failed))

    async def release_trajectories(self, rollout_ids: Iterable[str]) -> int:
        """Deletes the store's copies of the trajectories of successful attempts, and returns how many there were.

        For a caller that has them on a disk of its own. All else about the rollouts stays; the space is reused.
        Rollouts that do not exist, have not succeeded or were released before are skipped.
        """
        return await self.execute(calls.ReleaseTrajectories(list(rollout_ids)))

    async def wait_for_rollouts(
        self, rollout_ids: Iterable[str], *, timeout: float | None = None
    ) -> list[Rollout]:
        """Waits until all are final or the timeout is over; returns the final ones, in the order of the ids."""
        seconds = inf if timeout is None else timeout
        return await self.execute(calls.WaitForRollouts(list(dict.fromkeys(rollout_ids)), seconds))

    # -- queries ------------------------------------------------------------------------------------

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        """The rollout, or `None`."""
        return await self.execute(calls.GetRolloutById(rollout_id))

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """The newest attempt; `None` for a rollout without attempts, and for one that does not exist."""
        return await self.execute(calls.GetLatestAttempt(rollout_id))

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
        """The rollouts that match all filters. `limit=-1`: all, `limit=0`: only the total. Those without a value for
        `sort_by` come last."""
        call = calls.QueryRollouts(
            parse_statuses(RolloutStatus, status),
            None if rollout_ids is None else list(rollout_ids),
            rollout_id_contains,
            mode,
            sort_by,  # type: ignore[arg-type]  # the record checks it
            sort_order,
            limit=limit,
            offset=offset,
        )
        return await self.execute(call)

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> Page[Attempt]:
        """The attempts at one rollout, in the order in which they began."""
        return await self.execute(calls.QueryAttempts(rollout_id, sort_order, limit=limit, offset=offset))

    async def query_workers(
        self,
        *,
        status: WorkerStatus | str | Iterable[WorkerStatus | str] | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> Page[WorkerRecord]:
        """The workers, in the order of their ids."""
        statuses = parse_statuses(WorkerStatus, status)
        return await self.execute(calls.QueryWorkers(statuses, limit=limit, offset=offset))

    async def get_worker_by_id(self, worker_id: str) -> WorkerRecord | None:
        """The worker, or `None`."""
        return await self.execute(calls.GetWorkerById(worker_id))

    async def statistics(self) -> dict[str, int]:
        """Rollouts by status, the numbers of `attempts` and `workers`, and the last cursor of `completions`."""
        return await self.execute(calls.Statistics())

    async def read_events(self, after: int = 0, *, limit: int = 10_000) -> list[Event]:
        """The store's history behind sequence number `after`, for `rollwright.store.invariants` to check."""
        return await self.execute(calls.ReadEvents(after=after, limit=limit))

    # -- settings shared with the workers --------------------------------------------------------------

    async def add_resources(
        self, resources: Mapping[str, Any], *, resources_id: str | None = None
    ) -> ResourcesUpdate:
        """Adds version 1. An id that exists already is rejected, unless its first version has the same values."""
        return await self.execute(calls.AddResources(dict(resources), resources_id))

    async def update_resources(self, resources_id: str, resources: Mapping[str, Any]) -> ResourcesUpdate:
        """Adds the next version; returns the newest one when nothing differs."""
        return await self.execute(calls.UpdateResources(resources_id, dict(resources)))

    async def get_resources_by_id(
        self, resources_id: str, *, version: int | None = None
    ) -> ResourcesUpdate | None:
        """One version, by default the newest; `None` if there is none."""
        return await self.execute(calls.GetResourcesById(resources_id, version))

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """The resources that were added or updated last."""
        return await self.execute(calls.GetLatestResources())

    async def query_resources(
        self, *, resources_id_contains: str | None = None, limit: int = -1, offset: int = 0
    ) -> Page[ResourcesUpdate]:
        """The newest version of each, in the order of their ids."""
        return await self.execute(calls.QueryResources(resources_id_contains, limit=limit, offset=offset))

    # -- housekeeping ---------------------------------------------------------------------------------

    async def delete_rollouts(self, rollout_ids: Iterable[str]) -> int:
        """Deletes final rollouts with all that belongs to them, and returns how many.

        Rejected if one of them is not final; ids that do not exist are skipped. Events from before the oldest rollout
        that is left are deleted too.
        """
        return await self.execute(calls.DeleteRollouts(list(rollout_ids)))

    async def delete_finished(self, *, older_than: float, limit: int = 10_000) -> int:
        """Retention: deletes up to `limit` rollouts that ended more than `older_than` seconds ago."""
        return await self.execute(calls.DeleteFinished(older_than, limit))
