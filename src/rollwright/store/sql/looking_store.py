"""The half of `SqlStore` that looks: queries, pages, counts, and resources."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from rollwright.forks import bind_to_process
from rollwright.store.checks import ROLLOUT_SORTS, check_id, check_page, check_part, new_id, parse_statuses
from rollwright.store.contract import Store, StoreDamaged, StoreError
from rollwright.store.records import (
    Attempt,
    Event,
    Page,
    ResourcesUpdate,
    Rollout,
    RolloutStatus,
    Worker,
    WorkerStatus,
)
from rollwright.store.sql import looking
from rollwright.store.sql.changes import expire
from rollwright.store.sql.driver import Driver, Write
from rollwright.store.sql.reporting import write_stamps
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
"""Of ending leases before a read: the next one may end meanwhile, but not always another one."""


class LookingStore(Store):
    """Everything that changes no rollout."""

    def __init__(self, driver: Driver) -> None:
        bind_to_process(self)
        self._driver = driver
        self._closed = False

    def _write(
        self,
        make: Write[Result],
        *,
        lasting: bool = True,
        brief: bool = False,
        orphaned: Callable[[Result], None] | None = None,
    ) -> "asyncio.Future[Result]":
        if self._closed:
            raise StoreError("the store is closed")
        return self._driver.write(make, lasting=lasting, brief=brief, orphaned=orphaned)

    async def _read(self, make: Callable[..., Operation[Result]], *arguments: Any) -> Result:
        """Never shows an attempt whose lease is over as alive: it is ended first."""
        if self._closed:
            raise StoreError("the store is closed")
        for _ in range(MOST_ROUNDS):
            found = await self._driver.read(partial(_unless_lapsed, make, arguments))
            if found is not None:
                return found[0]
            await self._driver.write(expire, lasting=False)
        raise StoreDamaged(f"{self._driver.where} is damaged: a lease that is over cannot be ended")

    async def _read_settled(self, make: Callable[..., Operation[Result]], *arguments: Any) -> Result:
        """What has nothing to do with attempts that are alive."""
        if self._closed:
            raise StoreError("the store is closed")
        return await self._driver.read(partial(make, *arguments))

    async def _show_stamps(self) -> None:
        """Workers were heard of in this process that the database does not know of yet."""
        if self._driver.stamps:
            await self._write(write_stamps, lasting=False)

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        return (await self._read(looking.find_rollouts, [rollout_id])).get(rollout_id)

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        return await self._read(looking.latest_attempt, rollout_id)

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
        return await self._read(
            looking.query_rollouts,
            parse_statuses(RolloutStatus, status),
            None if rollout_ids is None else list(rollout_ids),
            check_part(rollout_id_contains, "rollout_id_contains"),
            mode,
            sort_by,
            sort_order,
            limit,
            offset,
        )

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> Page[Attempt]:
        check_page(limit, offset, sort_order)
        return await self._read(looking.query_attempts, rollout_id, sort_order, limit, offset)

    async def query_workers(
        self,
        *,
        status: WorkerStatus | str | Iterable[WorkerStatus | str] | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> Page[Worker]:
        check_page(limit, offset)
        await self._show_stamps()
        return await self._read(looking.query_workers, parse_statuses(WorkerStatus, status), limit, offset)

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        await self._show_stamps()
        return await self._read(looking.find_worker, worker_id)

    async def statistics(self) -> dict[str, int]:
        await self._show_stamps()
        return await self._read(looking.statistics)

    async def get_trajectories(self, rollout_ids: Sequence[str], *, failed: bool = False) -> dict[str, bytes]:
        return await self._read_settled(looking.get_trajectories, rollout_ids, failed)

    async def read_journal(self, rollout_id: str) -> list[bytes]:
        return await self._read(looking.read_journal, rollout_id)

    async def read_events(self, after: int = 0, *, limit: int = 10_000) -> list[Event]:
        return await self._read(looking.read_events, after, limit)

    async def add_resources(
        self, resources: Mapping[str, Any], *, resources_id: str | None = None
    ) -> ResourcesUpdate:
        name = new_id("rs") if resources_id is None else check_id(resources_id, "resources_id")
        return await self._write(lambda tx: add_resources(tx, name, resources))

    async def update_resources(self, resources_id: str, resources: Mapping[str, Any]) -> ResourcesUpdate:
        return await self._write(lambda tx: update_resources(tx, resources_id, resources))

    async def get_resources_by_id(
        self, resources_id: str, *, version: int | None = None
    ) -> ResourcesUpdate | None:
        return await self._read(get_resources, resources_id, version)

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return await self._read(latest_resources)

    async def query_resources(
        self, *, resources_id_contains: str | None = None, limit: int = -1, offset: int = 0
    ) -> Page[ResourcesUpdate]:
        check_page(limit, offset)
        part = check_part(resources_id_contains, "resources_id_contains")
        return await self._read(query_resources, part, limit, offset)


def _unless_lapsed(
    make: Callable[..., Operation[Result]], arguments: Sequence[Any]
) -> Operation[tuple[Result] | None]:
    """The result, or `None` if there is a lease to be ended first."""
    lease, now = yield from looking.first_lease()
    if lapsed(lease, now):
        return None
    return ((yield from make(*arguments)),)
