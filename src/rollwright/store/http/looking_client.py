"""The client's calls that read results and records, share settings and keep house.

Arguments are checked here as every backend checks them, so that a mistake reads the same over HTTP as it does in
memory; the server checks again.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from rollwright.store.checks import ROLLOUT_SORTS, check_id, check_page, new_id, parse_statuses
from rollwright.store.contract import Store, StoreError
from rollwright.store.http import looking_calls as calls
from rollwright.store.http.batcher import Batcher, decode, encode
from rollwright.store.http.connection import Connection
from rollwright.store.http.messages import MAX_WAIT_SECONDS, Answer, Call
from rollwright.store.http.retry import RetryRule
from rollwright.store.records import (
    Attempt,
    Completion,
    Event,
    Page,
    ResourcesUpdate,
    Rollout,
    RolloutStatus,
    Worker,
    WorkerStatus,
)
from rollwright.store.waiting import Deadline

Item = TypeVar("Item")


class LookingClient(Store):
    def __init__(self, url: str, *, token: str | None, retry: RetryRule, request_timeout: float) -> None:
        self._connection = Connection(url, token, retry, request_timeout)
        self._batcher = Batcher(self._connection)
        self._polls: set[asyncio.Task[bytes]] = set()
        self._closed = False

    # -- asking the server ----------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")

    async def _send(self, call: Call[Answer]) -> Answer:
        """For short calls, which share requests."""
        self._begin()
        return await self._batcher.send(call)

    async def _ask(self, call: Call[Answer]) -> Answer:
        """For calls whose answer may be large or late: in a request of its own."""
        self._begin()
        return decode(call, await self._connection.post(call.name, encode(call)))

    async def _poll(self, call: Call[list[Item]], left: float | None) -> list[Item]:
        """Lets the server wait for as long as one request may; empty when the store is closed meanwhile."""
        self._begin()
        wait = MAX_WAIT_SECONDS if left is None else min(left, MAX_WAIT_SECONDS)
        body = encode(msgspec.structs.replace(call, timeout=wait))
        poll = asyncio.create_task(self._connection.post(call.name, body, wait))
        self._polls.add(poll)
        try:
            await asyncio.wait({poll})
            return [] if poll.cancelled() else decode(call, poll.result())
        finally:
            self._polls.discard(poll)
            poll.cancel()

    async def close(self) -> None:
        """Ends the waiting calls and closes the connections. The server's store stays open."""
        self._closed = True
        polls = list(self._polls)
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        await self._batcher.close()
        await self._connection.close()

    # -- results ------------------------------------------------------------------------------------

    async def read_completions(
        self, after: int = 0, *, limit: int = 1000, timeout: float = 0.0
    ) -> list[Completion]:
        call = calls.ReadCompletions(after=after, limit=limit)
        if timeout <= 0:
            return await self._send(call)
        deadline = Deadline(timeout)
        while True:
            found = await self._poll(call, deadline.left())
            if found or self._closed or not deadline.left():
                return found

    async def get_trajectories(self, rollout_ids: Sequence[str], *, failed: bool = False) -> dict[str, bytes]:
        return await self._ask(calls.GetTrajectories(rollout_ids=list(rollout_ids), failed=failed))

    async def wait_for_rollouts(
        self, rollout_ids: Iterable[str], *, timeout: float | None = None
    ) -> list[Rollout]:
        call = calls.WaitForRollouts(rollout_ids=list(dict.fromkeys(rollout_ids)))
        if timeout is not None and timeout <= 0:
            return await self._ask(call)
        deadline = Deadline(timeout)
        while True:
            found = await self._poll(call, deadline.left())
            if len(found) == len(call.rollout_ids) or self._closed or deadline.left() == 0:
                return found

    # -- looking ------------------------------------------------------------------------------------

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        return await self._send(calls.GetRolloutById(rollout_id=rollout_id))

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        return await self._send(calls.GetLatestAttempt(rollout_id=rollout_id))

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
        check_page(limit, offset, sort_order, sort_by, ROLLOUT_SORTS)
        call = calls.QueryRollouts(
            status=parse_statuses(RolloutStatus, status),
            rollout_ids=None if rollout_ids is None else list(rollout_ids),
            rollout_id_contains=rollout_id_contains,
            mode=mode,
            sort_by=sort_by,  # type: ignore[arg-type] # checked above
            sort_order=sort_order,
            limit=limit,
            offset=offset,
        )
        return (await self._ask(call)).page()

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> Page[Attempt]:
        check_page(limit, offset, sort_order)
        call = calls.QueryAttempts(rollout_id=rollout_id, sort_order=sort_order, limit=limit, offset=offset)
        return (await self._ask(call)).page()

    async def query_workers(
        self,
        *,
        status: WorkerStatus | str | Iterable[WorkerStatus | str] | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> Page[Worker]:
        check_page(limit, offset)
        statuses = parse_statuses(WorkerStatus, status)
        return (await self._ask(calls.QueryWorkers(status=statuses, limit=limit, offset=offset))).page()

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        return await self._send(calls.GetWorkerById(worker_id=worker_id))

    async def statistics(self) -> dict[str, int]:
        return await self._send(calls.Statistics())

    async def read_events(self, after: int = 0, *, limit: int = 10_000) -> list[Event]:
        return await self._ask(calls.ReadEvents(after=after, limit=limit))

    # -- settings shared with the workers --------------------------------------------------------------

    async def add_resources(
        self, resources: Mapping[str, Any], *, resources_id: str | None = None
    ) -> ResourcesUpdate:
        # Named here, so that a repeat of the request adds nothing.
        name = new_id("rs") if resources_id is None else check_id(resources_id, "resources_id")
        return await self._ask(calls.AddResources(resources=dict(resources), resources_id=name))

    async def update_resources(self, resources_id: str, resources: Mapping[str, Any]) -> ResourcesUpdate:
        return await self._ask(
            calls.UpdateResources(
                resources_id=resources_id, resources=dict(resources), call_id=new_id("call")
            )
        )

    async def get_resources_by_id(
        self, resources_id: str, *, version: int | None = None
    ) -> ResourcesUpdate | None:
        return await self._ask(calls.GetResourcesById(resources_id=resources_id, version=version))

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return await self._ask(calls.GetLatestResources())

    async def query_resources(
        self, *, resources_id_contains: str | None = None, limit: int = -1, offset: int = 0
    ) -> Page[ResourcesUpdate]:
        check_page(limit, offset)
        call = calls.QueryResources(resources_id_contains=resources_id_contains, limit=limit, offset=offset)
        return (await self._ask(call)).page()

    # -- housekeeping ---------------------------------------------------------------------------------

    async def release_trajectories(self, rollout_ids: Iterable[str]) -> int:
        return await self._ask(
            calls.ReleaseTrajectories(rollout_ids=list(rollout_ids), call_id=new_id("call"))
        )

    async def delete_rollouts(self, rollout_ids: Iterable[str]) -> int:
        return await self._ask(calls.DeleteRollouts(rollout_ids=list(rollout_ids), call_id=new_id("call")))

    async def delete_finished(self, *, older_than: float, limit: int = 10_000) -> int:
        return await self._ask(
            calls.DeleteFinished(older_than=older_than, limit=limit, call_id=new_id("call"))
        )
