"""The calls that read results and records, share settings and keep house."""

from typing import Annotated, Any, Literal

import msgspec

from rollwright.store.contract import Store
from rollwright.store.http.messages import (
    MAX_ITEMS,
    MAX_PAGE_BYTES,
    Call,
    Count,
    Cursor,
    FilterIds,
    Id,
    Ids,
    Limit,
    Once,
    Seconds,
    TrajectoryPage,
    Wait,
    WirePage,
)
from rollwright.store.records import (
    Attempt,
    Completion,
    Event,
    ResourcesUpdate,
    Rollout,
    RolloutStatus,
    Worker,
    WorkerStatus,
)

TRAJECTORIES_AT_ONCE = 16
"""Read before the size of the answer is looked at again: a group of usual size."""

Version = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class ReadCompletions(Call[list[Completion]], frozen=True):
    name = "read_completions"
    answer = list[Completion]

    after: Cursor = 0
    limit: Limit = MAX_ITEMS
    timeout: Wait = 0.0

    async def make(self, store: Store) -> list[Completion]:
        return await store.read_completions(self.after, limit=self.limit, timeout=self.timeout)


class GetTrajectories(Call[TrajectoryPage], frozen=True):
    name = "get_trajectories"
    wide = True
    answer = TrajectoryPage

    rollout_ids: Ids
    failed: bool = False

    async def make(self, store: Store) -> TrajectoryPage:
        found: dict[str, bytes] = {}
        for start in range(0, len(self.rollout_ids), TRAJECTORIES_AT_ONCE):
            if sum(map(len, found.values())) > MAX_PAGE_BYTES:
                return TrajectoryPage(found, self.rollout_ids[start:])
            some = self.rollout_ids[start : start + TRAJECTORIES_AT_ONCE]
            found |= await store.get_trajectories(some, failed=self.failed)
        return TrajectoryPage(found, [])


class WaitForRollouts(Call[list[Rollout]], frozen=True):
    name = "wait_for_rollouts"
    answer = list[Rollout]

    rollout_ids: Ids
    timeout: Wait = 0.0

    async def make(self, store: Store) -> list[Rollout]:
        return await store.wait_for_rollouts(self.rollout_ids, timeout=self.timeout)


class GetRolloutById(Call[Rollout | None], frozen=True):
    name = "get_rollout_by_id"
    answer = Rollout | None

    rollout_id: Id

    async def make(self, store: Store) -> Rollout | None:
        return await store.get_rollout_by_id(self.rollout_id)


class GetLatestAttempt(Call[Attempt | None], frozen=True):
    name = "get_latest_attempt"
    answer = Attempt | None

    rollout_id: Id

    async def make(self, store: Store) -> Attempt | None:
        return await store.get_latest_attempt(self.rollout_id)


class QueryRollouts(Call[WirePage[Rollout]], frozen=True):
    name = "query_rollouts"
    wide = True
    answer = WirePage[Rollout]

    status: list[RolloutStatus] | None = None
    rollout_ids: FilterIds | None = None
    rollout_id_contains: str | None = None
    mode: Id | None = None
    sort_by: Literal["start_time", "end_time", "rollout_id", "status", "mode", "priority"] = "start_time"
    sort_order: Literal["asc", "desc"] = "asc"
    limit: Limit = MAX_ITEMS
    offset: Count = 0

    async def make(self, store: Store) -> WirePage[Rollout]:
        return WirePage.of(
            await store.query_rollouts(
                status=self.status,
                rollout_ids=self.rollout_ids,
                rollout_id_contains=self.rollout_id_contains,
                mode=self.mode,
                sort_by=self.sort_by,
                sort_order=self.sort_order,
                limit=self.limit,
                offset=self.offset,
            )
        )


class QueryAttempts(Call[WirePage[Attempt]], frozen=True):
    name = "query_attempts"
    answer = WirePage[Attempt]

    rollout_id: Id
    sort_order: Literal["asc", "desc"] = "asc"
    limit: Limit = MAX_ITEMS
    offset: Count = 0

    async def make(self, store: Store) -> WirePage[Attempt]:
        return WirePage.of(
            await store.query_attempts(
                self.rollout_id, sort_order=self.sort_order, limit=self.limit, offset=self.offset
            )
        )


class QueryWorkers(Call[WirePage[Worker]], frozen=True):
    name = "query_workers"
    wide = True
    answer = WirePage[Worker]

    status: list[WorkerStatus] | None = None
    limit: Limit = MAX_ITEMS
    offset: Count = 0

    async def make(self, store: Store) -> WirePage[Worker]:
        return WirePage.of(
            await store.query_workers(status=self.status, limit=self.limit, offset=self.offset)
        )


class GetWorkerById(Call[Worker | None], frozen=True):
    name = "get_worker_by_id"
    answer = Worker | None

    worker_id: Id

    async def make(self, store: Store) -> Worker | None:
        return await store.get_worker_by_id(self.worker_id)


class Statistics(Call[dict[str, int]], frozen=True):
    name = "statistics"
    answer = dict[str, int]

    async def make(self, store: Store) -> dict[str, int]:
        return await store.statistics()


class ReadEvents(Call[list[Event]], frozen=True):
    name = "read_events"
    wide = True
    answer = list[Event]

    after: Cursor = 0
    limit: Limit = MAX_ITEMS

    async def make(self, store: Store) -> list[Event]:
        return await store.read_events(self.after, limit=self.limit)


class AddResources(Call[ResourcesUpdate], frozen=True):
    name = "add_resources"
    answer = ResourcesUpdate

    resources: dict[str, Any]
    resources_id: Id | None = None

    async def make(self, store: Store) -> ResourcesUpdate:
        return await store.add_resources(self.resources, resources_id=self.resources_id)


class UpdateResources(Once[ResourcesUpdate], frozen=True):
    name = "update_resources"
    answer = ResourcesUpdate

    resources_id: Id
    resources: dict[str, Any]

    async def make(self, store: Store) -> ResourcesUpdate:
        return await store.update_resources(self.resources_id, self.resources)


class GetResourcesById(Call[ResourcesUpdate | None], frozen=True):
    name = "get_resources_by_id"
    answer = ResourcesUpdate | None

    resources_id: Id
    version: Version | None = None

    async def make(self, store: Store) -> ResourcesUpdate | None:
        return await store.get_resources_by_id(self.resources_id, version=self.version)


class GetLatestResources(Call[ResourcesUpdate | None], frozen=True):
    name = "get_latest_resources"
    answer = ResourcesUpdate | None

    async def make(self, store: Store) -> ResourcesUpdate | None:
        return await store.get_latest_resources()


class QueryResources(Call[WirePage[ResourcesUpdate]], frozen=True):
    name = "query_resources"
    wide = True
    answer = WirePage[ResourcesUpdate]

    resources_id_contains: str | None = None
    limit: Limit = MAX_ITEMS
    offset: Count = 0

    async def make(self, store: Store) -> WirePage[ResourcesUpdate]:
        return WirePage.of(
            await store.query_resources(
                resources_id_contains=self.resources_id_contains, limit=self.limit, offset=self.offset
            )
        )


class ReleaseTrajectories(Once[int], frozen=True):
    name = "release_trajectories"
    answer = int

    rollout_ids: list[Id]

    async def make(self, store: Store) -> int:
        return await store.release_trajectories(self.rollout_ids)


class DeleteRollouts(Once[int], frozen=True):
    name = "delete_rollouts"
    answer = int

    rollout_ids: Ids

    async def make(self, store: Store) -> int:
        return await store.delete_rollouts(self.rollout_ids)


class DeleteFinished(Once[int], frozen=True):
    name = "delete_finished"
    answer = int

    older_than: Seconds
    limit: Limit = MAX_ITEMS

    async def make(self, store: Store) -> int:
        return await store.delete_finished(older_than=self.older_than, limit=self.limit)
