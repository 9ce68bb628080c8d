"""`SqlQueries`: the SQL store's queries, counts and resources."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from rollwright.forks import bind_to_process
from rollwright.store import calls
from rollwright.store.backend import Backend, handles
from rollwright.store.checks import new_id
from rollwright.store.errors import StoreDamaged, StoreError
from rollwright.store.records import Attempt, Event, Page, ResourcesUpdate, Rollout, WorkerRecord
from rollwright.store.sql import queries
from rollwright.store.sql.attempts import write_stamps
from rollwright.store.sql.changes import expire
from rollwright.store.sql.driver import Driver, Write
from rollwright.store.sql.resources import (
    add_resources,
    get_resources,
    latest_resources,
    query_resources,
    update_resources,
)
from rollwright.store.sql.statements import Operation
from rollwright.store.transitions import lapsed

Result = TypeVar("Result")

MOST_ROUNDS = 1000
"""Most repetitions of a read that found an expired lease: another lease may expire meanwhile, but not each time."""


class SqlQueries(Backend):
    """Handlers of the calls that change no rollout, and the access to the driver."""

    def __init__(self, driver: Driver) -> None:
        bind_to_process(self)
        self._driver = driver
        self._closed = False

    def _write(
        self,
        make: Write[Result],
        *,
        durable: bool = True,
        brief: bool = False,
        orphaned: Callable[[Result], None] | None = None,
    ) -> "asyncio.Future[Result]":
        if self._closed:
            raise StoreError("the store is closed")
        return self._driver.write(make, durable=durable, brief=brief, orphaned=orphaned)

    async def _read(self, make: Callable[..., Operation[Result]], *arguments: Any) -> Result:
        """Runs a read. An attempt whose lease has expired is ended first, so that it is never shown as alive."""
        if self._closed:
            raise StoreError("the store is closed")
        for _ in range(MOST_ROUNDS):
            found = await self._driver.read(partial(_unless_lapsed, make, arguments))
            if found is not None:
                return found[0]
            await self._driver.write(expire, durable=False)
        raise StoreDamaged(f"{self._driver.where} is damaged: an expired lease cannot be ended")

    async def _read_settled(self, make: Callable[..., Operation[Result]], *arguments: Any) -> Result:
        """Runs a read whose result does not depend on attempts that are alive."""
        if self._closed:
            raise StoreError("the store is closed")
        return await self._driver.read(partial(make, *arguments))

    async def _write_stamps(self) -> None:
        """Writes signs of life that are still pending in this process, before a query of workers."""
        if self._driver.stamps:
            await self._write(write_stamps, durable=False)

    @handles(calls.GetRolloutById)
    async def _get_rollout_by_id(self, call: calls.GetRolloutById) -> Rollout | None:
        return (await self._read(queries.find_rollouts, [call.rollout_id])).get(call.rollout_id)

    @handles(calls.GetLatestAttempt)
    async def _get_latest_attempt(self, call: calls.GetLatestAttempt) -> Attempt | None:
        return await self._read(queries.latest_attempt, call.rollout_id)

    @handles(calls.QueryRollouts)
    async def _query_rollouts(self, call: calls.QueryRollouts) -> Page[Rollout]:
        return await self._read(
            queries.query_rollouts,
            call.status,
            call.rollout_ids,
            call.rollout_id_contains,
            call.mode,
            call.sort_by,
            call.sort_order,
            call.limit,
            call.offset,
        )

    @handles(calls.QueryAttempts)
    async def _query_attempts(self, call: calls.QueryAttempts) -> Page[Attempt]:
        return await self._read(
            queries.query_attempts, call.rollout_id, call.sort_order, call.limit, call.offset
        )

    @handles(calls.QueryWorkers)
    async def _query_workers(self, call: calls.QueryWorkers) -> Page[WorkerRecord]:
        await self._write_stamps()
        return await self._read(queries.query_workers, call.status, call.limit, call.offset)

    @handles(calls.GetWorkerById)
    async def _get_worker_by_id(self, call: calls.GetWorkerById) -> WorkerRecord | None:
        await self._write_stamps()
        return await self._read(queries.find_worker, call.worker_id)

    @handles(calls.Statistics)
    async def _statistics(self, call: calls.Statistics) -> dict[str, int]:
        await self._write_stamps()
        return await self._read(queries.statistics)

    @handles(calls.GetTrajectories)
    async def _get_trajectories(self, call: calls.GetTrajectories) -> dict[str, bytes]:
        return await self._read_settled(queries.get_trajectories, call.rollout_ids, call.failed)

    @handles(calls.ReadJournal)
    async def _read_journal(self, call: calls.ReadJournal) -> list[bytes]:
        return await self._read(queries.read_journal, call.rollout_id)

    @handles(calls.ReadEvents)
    async def _read_events(self, call: calls.ReadEvents) -> list[Event]:
        return await self._read(queries.read_events, call.after, call.limit)

    @handles(calls.AddResources)
    async def _add_resources(self, call: calls.AddResources) -> ResourcesUpdate:
        name = new_id("rs") if call.resources_id is None else call.resources_id
        return await self._write(lambda tx: add_resources(tx, name, call.resources))

    @handles(calls.UpdateResources)
    async def _update_resources(self, call: calls.UpdateResources) -> ResourcesUpdate:
        return await self._write(lambda tx: update_resources(tx, call.resources_id, call.resources))

    @handles(calls.GetResourcesById)
    async def _get_resources_by_id(self, call: calls.GetResourcesById) -> ResourcesUpdate | None:
        return await self._read(get_resources, call.resources_id, call.version)

    @handles(calls.GetLatestResources)
    async def _get_latest_resources(self, call: calls.GetLatestResources) -> ResourcesUpdate | None:
        return await self._read(latest_resources)

    @handles(calls.QueryResources)
    async def _query_resources(self, call: calls.QueryResources) -> Page[ResourcesUpdate]:
        return await self._read(query_resources, call.resources_id_contains, call.limit, call.offset)


def _unless_lapsed(
    make: Callable[..., Operation[Result]], arguments: Sequence[Any]
) -> Operation[tuple[Result] | None]:
    """The result in a tuple, or `None` if an expired lease has to be ended first."""
    lease, now = yield from queries.first_lease()
    if lapsed(lease, now):
        return None
    return ((yield from make(*arguments)),)
