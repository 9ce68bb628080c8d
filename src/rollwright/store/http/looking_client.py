"""The client's calls that read results and records, share settings and keep house.

Arguments are checked here as every backend checks them, so that a mistake reads the same over HTTP as it does in
memory; the server checks again. What a request may not hold or answer at once (`MAX_ITEMS`) is sent and read in
portions, one after the other.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from rollwright.store.checks import ROLLOUT_SORTS, check_id, check_page, new_id, parse_statuses
from rollwright.store.contract import Store, StoreError
from rollwright.store.http import looking_calls as calls
from rollwright.store.http.batcher import Batcher, decode, encode
from rollwright.store.http.connection import Connection
from rollwright.store.http.messages import MAX_ITEMS, MAX_WAIT_SECONDS, Answer, Call, WirePage
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
    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        retry: RetryRule,
        request_timeout: float,
        on_outage: Callable[[str], None] | None,
    ) -> None:
        self._connection = Connection(url, token, retry, request_timeout, on_outage)
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

    async def _pages(self, call: Call[WirePage[Item]], limit: int, offset: int) -> Page[Item]:
        """What is asked for, page after page."""
        items: list[Item] = []
        while True:
            size = MAX_ITEMS if limit < 0 else min(limit - len(items), MAX_ITEMS)
            place = offset + len(items)
            page = await self._ask(msgspec.structs.replace(call, limit=size, offset=place))
            items += page.items
            if not page.items or len(items) == limit or offset + len(items) >= page.total:
                return Page(items, page.total, limit, offset)

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
        call = calls.ReadCompletions(after=after, limit=min(limit, MAX_ITEMS))
        if timeout <= 0:
            found = await self._send(call)
        else:
            deadline = Deadline(timeout)
            while not (found := await self._poll(call, deadline.left())):
                if self._closed or not deadline.left():
                    return found
        while len(found) < limit and len(found) % MAX_ITEMS == 0 and found:
            more = calls.ReadCompletions(after=found[-1].cursor, limit=min(limit - len(found), MAX_ITEMS))
            if not (read := await self._send(more)):
                break
            found += read
        return found

    async def get_trajectories(self, rollout_ids: Sequence[str], *, failed: bool = False) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        left = list(dict.fromkeys(rollout_ids))
        while left:
            asked, left = left[:MAX_ITEMS], left[MAX_ITEMS:]
            page = await self._ask(calls.GetTrajectories(rollout_ids=asked, failed=failed))
            found |= page.trajectories
            left = page.unread + left
        return found

    async def wait_for_rollouts(
        self, rollout_ids: Iterable[str], *, timeout: float | None = None
    ) -> list[Rollout]:
        deadline = Deadline(timeout)
        found = []
        for ids in portions(list(dict.fromkeys(rollout_ids))):
            found += await self._wait_for_some(calls.WaitForRollouts(rollout_ids=ids), deadline)
        return found

    async def _wait_for_some(self, call: calls.WaitForRollouts, deadline: Deadline) -> list[Rollout]:
        if deadline.left() == 0:
            return await self._ask(call)
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
        )
        found = await self._pages(call, limit, offset)
        if len(found.items) <= MAX_ITEMS:
            return found
        # Between two pages a rollout may have moved to a later place.
        once = {each.rollout_id: each for each in found.items}
        return Page(list(once.values()), found.total, limit, offset)

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> Page[Attempt]:
        check_page(limit, offset, sort_order)
        call = calls.QueryAttempts(rollout_id=rollout_id, sort_order=sort_order)
        return await self._pages(call, limit, offset)

    async def query_workers(
        self,
        *,
        status: WorkerStatus | str | Iterable[WorkerStatus | str] | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> Page[Worker]:
        check_page(limit, offset)
        statuses = parse_statuses(WorkerStatus, status)
        return await self._pages(calls.QueryWorkers(status=statuses), limit, offset)

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        return await self._send(calls.GetWorkerById(worker_id=worker_id))

    async def statistics(self) -> dict[str, int]:
        return await self._send(calls.Statistics())

    async def read_events(self, after: int = 0, *, limit: int = 10_000) -> list[Event]:
        found: list[Event] = []
        while len(found) < limit:
            size = min(limit - len(found), MAX_ITEMS)
            read = await self._ask(calls.ReadEvents(after=found[-1].sequence if found else after, limit=size))
            found += read
            if len(read) < size:
                break
        return found

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
        call = calls.QueryResources(resources_id_contains=resources_id_contains)
        return await self._pages(call, limit, offset)

    # -- housekeeping ---------------------------------------------------------------------------------

    async def release_trajectories(self, rollout_ids: Iterable[str]) -> int:
        return await self._ask(
            calls.ReleaseTrajectories(rollout_ids=list(rollout_ids), call_id=new_id("call"))
        )

    async def delete_rollouts(self, rollout_ids: Iterable[str]) -> int:
        deleted = 0
        for ids in portions(list(rollout_ids)):
            deleted += await self._ask(calls.DeleteRollouts(rollout_ids=ids, call_id=new_id("call")))
        return deleted

    async def delete_finished(self, *, older_than: float, limit: int = 10_000) -> int:
        deleted = 0
        while deleted < limit:
            size = min(limit - deleted, MAX_ITEMS)
            call = calls.DeleteFinished(older_than=older_than, limit=size, call_id=new_id("call"))
            gone = await self._ask(call)
            deleted += gone
            if gone < size:
                break
        return deleted


def portions(items: Sequence[Item]) -> Iterator[list[Item]]:
    """As many at a time as one request may hold; one that is empty if there are none, so that the call is made."""
    for start in range(0, max(len(items), 1), MAX_ITEMS):
        yield list(items[start : start + MAX_ITEMS])
