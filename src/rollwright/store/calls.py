"""Every call of the store as one frozen record: its arguments with their bounds, its checks and its result type.

To add a call: write its record here, its method in `api.py`, and its handler in the memory and the SQL store. The HTTP
client, the server's dispatch, its argument checks and the OpenAPI document follow from the record.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

import msgspec
from msgspec.structs import force_setattr, replace

from rollwright.store.call_kinds import (
    MAX_ITEMS,
    MAX_PAGE_BYTES,
    ClaimCall,
    Execute,
    FilterIds,
    Id,
    Ids,
    Limit,
    LogCall,
    OnceCall,
    PagedCall,
    Pair,
    Seconds,
    StoreCall,
    Wait,
)
from rollwright.store.checks import (
    LATEST,
    check_change,
    check_claim,
    check_id,
    check_page,
    check_part,
    check_request,
    new_id,
)
from rollwright.store.errors import StoreError
from rollwright.store.records import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    CompletionEntry,
    EnqueueRequest,
    Event,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    WorkerRecord,
    WorkerStatus,
)
from rollwright.store.transitions import FINAL_ATTEMPT

MAX_PORTION_BYTES = 98 * 1024
"""Of rollouts that are enqueued by one request: a body has no more values than bytes, and the server decodes up to
100,000 values."""

TRAJECTORIES_AT_ONCE = 16
"""Read before the size of the reply is checked again: a group of usual size."""

RolloutSort = Literal["start_time", "end_time", "rollout_id", "status", "mode", "priority"]
SortOrder = Literal["asc", "desc"]
Version = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]

# -- asking for episodes ------------------------------------------------------------------------------


class EnqueueManyRollouts(StoreCall[list[Rollout]], frozen=True, gc=False):
    requests: Annotated[list[EnqueueRequest], msgspec.Meta(max_length=MAX_ITEMS)]

    def is_bulky(self) -> bool:
        return len(self.requests) > 1

    def repeatable(self) -> Self:
        return replace(self, requests=[_named(request) for request in self.requests])

    def fits(self) -> bool:
        return len(self.requests) <= 1

    def parts(self) -> Generator[StoreCall[Any], Any, list[Rollout]]:
        enqueued: list[Rollout] = []
        some: list[EnqueueRequest] = []
        size = 0
        for request in self.requests:
            length = len(msgspec.msgpack.encode(request))
            if some and (len(some) == MAX_ITEMS or size + length > MAX_PORTION_BYTES):
                enqueued += yield EnqueueManyRollouts(some)
                some, size = [], 0
            some.append(request)
            size += length
        enqueued += yield EnqueueManyRollouts(some)
        return enqueued


class UpdateRollout(OnceCall[Rollout], frozen=True, gc=False):
    rollout_id: Id
    status: RolloutStatus | None = None
    mode: Id | None = None
    resources_id: Id | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None
    priority: int | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        config = check_change(self.mode, self.resources_id, self.config, self.priority)
        force_setattr(self, "config", config)


class CancelRollouts(OnceCall[list[str]], frozen=True, gc=False):
    bulky = True
    split_by = "rollout_ids"

    rollout_ids: Ids
    reason: str


# -- playing them -------------------------------------------------------------------------------------


class DequeueManyRollouts(ClaimCall[list[AttemptedRollout]], frozen=True, gc=False):
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_ITEMS)] = 1
    timeout: Wait = 0.0

    def __post_init__(self) -> None:
        check_claim(self.limit, self.worker_id, self.claim_id)

    def fits(self) -> bool:
        return self.limit <= MAX_ITEMS

    def parts(self) -> Generator[StoreCall[Any], Any, list[AttemptedRollout]]:
        claimed: list[AttemptedRollout] = yield replace(self, limit=MAX_ITEMS)
        return claimed  # fewer than asked for, as whenever the queue has fewer


class StartAttempt(ClaimCall[AttemptedRollout], frozen=True, gc=False):
    rollout_id: Id


class StartRequestedRollout(ClaimCall[AttemptedRollout], frozen=True, gc=False):
    request: EnqueueRequest

    def repeatable(self) -> Self:
        call_id = new_id("call")
        return replace(self, request=_named(self.request), claim_id=self.claim_id or call_id, call_id=call_id)


class UpdateAttempt(OnceCall[Attempt], frozen=True, gc=False):
    rollout_id: Id
    attempt_id: Id
    status: AttemptStatus | None = None
    worker_id: Id | None = None
    trajectory: bytes | None = None
    reason: str | None = None
    metadata: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.worker_id is not None:
            check_id(self.worker_id, "worker_id")
        if self.trajectory is not None and self.status not in FINAL_ATTEMPT:
            raise StoreError(f"a trajectory comes with a final status, not with {self.status}")

    def repeatable(self) -> Self:
        # A report of a named attempt is idempotent by itself; when "latest" is repeated, it may be another attempt.
        return replace(self, call_id=new_id("call")) if self.attempt_id == LATEST else self


class FinishAndDequeue(ClaimCall[list[AttemptedRollout]], frozen=True, gc=False):
    rollout_id: Id
    attempt_id: Id
    status: AttemptStatus
    trajectory: bytes | None = None
    reason: str | None = None
    metadata: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_claim(1, self.worker_id, self.claim_id)
        if self.status not in FINAL_ATTEMPT:
            raise StoreError(f"an attempt ends with a final status, not with {self.status}")
        if self.attempt_id == LATEST:
            raise StoreError("an attempt is ended by its own id, not by 'latest'")


class UpdateWorker(StoreCall[list[tuple[str, str]]], frozen=True, gc=False):
    split_by = "attempts"

    worker_id: Id
    heartbeat_stats: dict[str, Any] | None = None
    attempts: Annotated[list[Pair], msgspec.Meta(max_length=MAX_ITEMS)] | None = None

    def __post_init__(self) -> None:
        check_id(self.worker_id, "worker_id")


class WaitForCancellations(OnceCall[list[tuple[str, str]]], frozen=True, gc=False):
    worker_id: Id
    timeout: Wait = 0.0

    def __post_init__(self) -> None:
        check_id(self.worker_id, "worker_id")


# -- the turn journal ---------------------------------------------------------------------------------


class AppendJournal(StoreCall[None], frozen=True, gc=False):
    rollout_id: Id
    attempt_id: Id
    entries: list[bytes]
    append_id: Id | None = None

    def repeatable(self) -> Self:
        return self if self.append_id is not None else replace(self, append_id=new_id("append"))


class ReadJournal(StoreCall[list[bytes]], frozen=True, gc=False):
    bulky = True

    rollout_id: Id


class ClearJournal(StoreCall[None], frozen=True, gc=False):
    rollout_id: Id
    attempt_id: Id


# -- results ------------------------------------------------------------------------------------------


class ReadCompletions(LogCall[CompletionEntry], frozen=True, gc=False):
    timeout: Wait = 0.0

    def behind(self, last: CompletionEntry) -> Self:
        return replace(self, after=last.cursor, timeout=0.0)


class TrajectoryPage(msgspec.Struct, frozen=True):
    """Trajectories, as many as one reply may hold."""

    trajectories: dict[str, bytes]
    unread: list[str]
    """Rollouts that were not read because the reply was full: to be asked for again."""


class GetTrajectories(StoreCall[dict[str, bytes]], frozen=True, gc=False):
    wide = True
    bulky = True
    reply = TrajectoryPage

    rollout_ids: Ids
    failed: bool = False

    def fits(self) -> bool:
        return False  # how many trajectories one reply holds depends on their size

    def parts(self) -> Generator[StoreCall[Any], Any, dict[str, bytes]]:
        found: dict[str, bytes] = {}
        left = list(dict.fromkeys(self.rollout_ids))
        while left:
            asked, left = left[:MAX_ITEMS], left[MAX_ITEMS:]
            page: TrajectoryPage = yield GetTrajectories(asked, self.failed)
            found |= page.trajectories
            left = page.unread + left
        return found

    async def bounded(self, execute: Execute) -> TrajectoryPage:
        found: dict[str, bytes] = {}
        for start in range(0, len(self.rollout_ids), TRAJECTORIES_AT_ONCE):
            if sum(map(len, found.values())) > MAX_PAGE_BYTES:
                return TrajectoryPage(found, self.rollout_ids[start:])
            some = self.rollout_ids[start : start + TRAJECTORIES_AT_ONCE]
            found |= await execute(GetTrajectories(some, self.failed))
        return TrajectoryPage(found, [])


class ReleaseTrajectories(OnceCall[int], frozen=True, gc=False):
    bulky = True
    split_by = "rollout_ids"

    rollout_ids: Ids


class WaitForRollouts(StoreCall[list[Rollout]], frozen=True, gc=False):
    bulky = True
    split_by = "rollout_ids"

    rollout_ids: Ids
    timeout: Wait = 0.0
    """In the same process it may be infinite."""

    def is_satisfied(self, result: Sequence[Rollout]) -> bool:
        return len(result) == len(self.rollout_ids)


# -- queries ------------------------------------------------------------------------------------------


class GetRolloutById(StoreCall[Rollout | None], frozen=True, gc=False):
    rollout_id: Id


class GetLatestAttempt(StoreCall[Attempt | None], frozen=True, gc=False):
    rollout_id: Id


class QueryRollouts(PagedCall[Rollout], frozen=True, gc=False):
    wide = True
    identity = "rollout_id"

    status: list[RolloutStatus] | None = None
    rollout_ids: FilterIds | None = None
    rollout_id_contains: str | None = None
    mode: Id | None = None
    sort_by: RolloutSort = "start_time"
    sort_order: SortOrder = "asc"

    def __post_init__(self) -> None:
        check_page(self.limit, self.offset, self.sort_order, self.sort_by, get_args(RolloutSort))
        check_part(self.rollout_id_contains, "rollout_id_contains")


class QueryAttempts(PagedCall[Attempt], frozen=True, gc=False):
    identity = "attempt_id"

    rollout_id: Id
    sort_order: SortOrder = "asc"

    def __post_init__(self) -> None:
        check_page(self.limit, self.offset, self.sort_order)


class QueryWorkers(PagedCall[WorkerRecord], frozen=True, gc=False):
    wide = True
    identity = "worker_id"

    status: list[WorkerStatus] | None = None

    def __post_init__(self) -> None:
        check_page(self.limit, self.offset)


class GetWorkerById(StoreCall[WorkerRecord | None], frozen=True, gc=False):
    worker_id: Id


class Statistics(StoreCall[dict[str, int]], frozen=True, gc=False):
    pass


class ReadEvents(LogCall[Event], frozen=True, gc=False):
    wide = True
    bulky = True

    def behind(self, last: Event) -> Self:
        return replace(self, after=last.sequence)


# -- settings shared with the workers -----------------------------------------------------------------


class AddResources(StoreCall[ResourcesUpdate], frozen=True, gc=False):
    bulky = True

    resources: dict[str, Any]
    resources_id: Id | None = None

    def __post_init__(self) -> None:
        if self.resources_id is not None:
            check_id(self.resources_id, "resources_id")

    def repeatable(self) -> Self:
        return self if self.resources_id is not None else replace(self, resources_id=new_id("rs"))


class UpdateResources(OnceCall[ResourcesUpdate], frozen=True, gc=False):
    bulky = True

    resources_id: Id
    resources: dict[str, Any]


class GetResourcesById(StoreCall[ResourcesUpdate | None], frozen=True, gc=False):
    bulky = True

    resources_id: Id
    version: Version | None = None


class GetLatestResources(StoreCall[ResourcesUpdate | None], frozen=True, gc=False):
    bulky = True


class QueryResources(PagedCall[ResourcesUpdate], frozen=True, gc=False):
    wide = True
    identity = "resources_id"

    resources_id_contains: str | None = None

    def __post_init__(self) -> None:
        check_page(self.limit, self.offset)
        check_part(self.resources_id_contains, "resources_id_contains")


# -- housekeeping -------------------------------------------------------------------------------------


class DeleteRollouts(OnceCall[int], frozen=True, gc=False):
    bulky = True
    split_by = "rollout_ids"

    rollout_ids: Ids


class DeleteFinished(OnceCall[int], frozen=True, gc=False):
    bulky = True

    older_than: Seconds
    limit: Limit = MAX_ITEMS

    def fits(self) -> bool:
        return 0 <= self.limit <= MAX_ITEMS

    def parts(self) -> Generator[StoreCall[Any], Any, int]:
        deleted = 0
        while deleted < self.limit:
            size = min(self.limit - deleted, MAX_ITEMS)
            gone: int = yield replace(self, limit=size).repeatable()
            deleted += gone
            if gone < size:
                break
        return deleted


def _named(request: EnqueueRequest) -> EnqueueRequest:
    """Checked, and with an id, so that a repeat of the request enqueues nothing twice."""
    checked = check_request(request)
    return replace(request, rollout_id=checked.rollout_id, input=msgspec.Raw(checked.input))


CALLS: Mapping[str, type[StoreCall[Any]]] = {
    kind.name: kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, StoreCall) and kind.__module__ == __name__
}
"""Every call by its name."""
