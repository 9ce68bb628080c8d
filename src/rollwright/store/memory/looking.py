"""The half of `MemoryStore` that looks: queries, pages, counts, and resources."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, TypeVar

from rollwright.forks import bind_to_process
from rollwright.store.checks import ROLLOUT_SORTS, check_id, check_page, check_part, new_id, parse_statuses
from rollwright.store.contract import Store, StoreError
from rollwright.store.memory.ledger import Ledger
from rollwright.store.memory.resources import Resources
from rollwright.store.memory.rows import RolloutRow
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
from rollwright.store.waiting import LoopClock

Row = TypeVar("Row")


class LookingStore(Store):
    """Everything that changes no rollout."""

    def __init__(self, *, clock: Callable[[], float] | None = None, record_events: bool = True) -> None:
        bind_to_process(self)  # a fork would play its own copies
        self._clock = clock if clock is not None else LoopClock()
        self._ledger = Ledger(record_events=record_events)
        self._resources = Resources()
        self._closed = False

    def _begin(self) -> float:
        """The time of the call that begins; what has lapsed by then is over before anything else happens."""
        if self._closed:
            raise StoreError("the store is closed")
        now = self._clock()
        if self._ledger.leases.bound <= now and self._ledger.expire(now):
            self._settle()
        return now

    def _settle(self) -> None:
        """Passes on what has changed to those who wait for it."""

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        self._begin()
        row = self._ledger.rollouts.get(rollout_id)
        return None if row is None else row.record()

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        self._begin()
        row = self._ledger.rollouts.get(rollout_id)
        return row.attempts[-1].record() if row is not None and row.attempts else None

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
        part = check_part(rollout_id_contains, "rollout_id_contains")
        statuses = parse_statuses(RolloutStatus, status)
        self._begin()
        rows = self._matching(statuses, rollout_ids, part, mode)
        total = len(rows)
        if limit != 0:
            rows = _ordered(rows, sort_by, sort_order)
        return Page([row.record() for row in _cut(rows, limit, offset)], total, limit, offset)

    def _matching(
        self,
        statuses: Sequence[RolloutStatus] | None,
        rollout_ids: Iterable[str] | None,
        contains: str | None,
        mode: str | None,
    ) -> list[RolloutRow]:
        """The rows that pass every filter that is given, in no particular order."""
        ledger = self._ledger
        if rollout_ids is not None:
            wanted = dict.fromkeys(rollout_ids)
            rows = [ledger.rollouts[each] for each in wanted if each in ledger.rollouts]
            if statuses is not None:
                rows = [row for row in rows if row.status in statuses]
        elif statuses is not None:
            rows = [row for each in statuses for row in ledger.by_status[each].values()]
        else:
            rows = list(ledger.rollouts.values())
        if contains is not None:
            rows = [row for row in rows if contains in row.rollout_id]
        if mode is not None:
            rows = [row for row in rows if row.mode == mode]
        return rows

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_order: Literal["asc", "desc"] = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> Page[Attempt]:
        check_page(limit, offset, sort_order)
        self._begin()
        attempts = self._ledger.rollout(rollout_id).attempts
        rows = attempts if sort_order == "asc" else attempts[::-1]
        return Page([row.record() for row in _cut(rows, limit, offset)], len(rows), limit, offset)

    async def query_workers(
        self,
        *,
        status: WorkerStatus | str | Iterable[WorkerStatus | str] | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> Page[Worker]:
        check_page(limit, offset)
        statuses = parse_statuses(WorkerStatus, status)
        now = self._begin()
        workers = self._ledger.roster.workers
        names = sorted(workers)
        if statuses is None:
            records = [workers[name].record(now) for name in _cut(names, limit, offset)]
            return Page(records, len(names), limit, offset)
        records = [workers[name].record(now) for name in names]
        records = [record for record in records if record.status in statuses]
        return Page(_cut(records, limit, offset), len(records), limit, offset)

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        now = self._begin()
        worker = self._ledger.roster.workers.get(worker_id)
        return None if worker is None else worker.record(now)

    async def statistics(self) -> dict[str, int]:
        self._begin()
        ledger = self._ledger
        counts = {str(status): len(rows) for status, rows in ledger.by_status.items()}
        return counts | {
            "attempts": ledger.attempts,
            "workers": len(ledger.roster.workers),
            "completions": ledger.log.last,
        }

    async def get_trajectories(self, rollout_ids: Sequence[str], *, failed: bool = False) -> dict[str, bytes]:
        self._begin()
        shown = {RolloutStatus.SUCCEEDED, RolloutStatus.FAILED} if failed else {RolloutStatus.SUCCEEDED}
        found = {}
        for rollout_id in rollout_ids:
            row = self._ledger.rollouts.get(rollout_id)
            if row is not None and row.status in shown and row.trajectory is not None:
                found[rollout_id] = row.trajectory
        return found

    async def read_journal(self, rollout_id: str) -> list[bytes]:
        self._begin()
        return list(self._ledger.rollout(rollout_id).journal or ())

    async def read_events(self, after: int = 0, *, limit: int = 10_000) -> list[Event]:
        self._begin()
        return self._ledger.events.after(after, limit)

    async def add_resources(
        self, resources: Mapping[str, Any], *, resources_id: str | None = None
    ) -> ResourcesUpdate:
        name = new_id("rs") if resources_id is None else check_id(resources_id, "resources_id")
        return self._resources.add(name, resources, self._begin())

    async def update_resources(self, resources_id: str, resources: Mapping[str, Any]) -> ResourcesUpdate:
        return self._resources.update(resources_id, resources, self._begin())

    async def get_resources_by_id(
        self, resources_id: str, *, version: int | None = None
    ) -> ResourcesUpdate | None:
        self._begin()
        return self._resources.get(resources_id, version)

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        self._begin()
        return self._resources.latest()

    async def query_resources(
        self, *, resources_id_contains: str | None = None, limit: int = -1, offset: int = 0
    ) -> Page[ResourcesUpdate]:
        check_page(limit, offset)
        part = check_part(resources_id_contains, "resources_id_contains") or ""
        self._begin()
        names = [each for each in self._resources.ids() if part in each]
        newest = [self._resources.get(name, None) for name in _cut(names, limit, offset)]
        return Page([each for each in newest if each is not None], len(names), limit, offset)


def _ordered(rows: list[RolloutRow], sort_by: str, sort_order: str) -> list[RolloutRow]:
    """By a field, then by arrival; rows without a value come last in either order.

    Sorted by arrival first, which most rows are already, and then by the field alone: sorting keeps the order of equals,
    and comparing numbers and texts is several times quicker than comparing pairs.
    """
    backwards = sort_order == "desc"
    rows.sort(key=_place, reverse=backwards)
    field = attrgetter(sort_by)
    valued = [row for row in rows if field(row) is not None]
    empty = [] if len(valued) == len(rows) else [row for row in rows if field(row) is None]
    valued.sort(key=field, reverse=backwards)
    return valued + empty


_place = attrgetter("place")


def _cut(rows: Sequence[Row], limit: int, offset: int) -> Sequence[Row]:
    return rows[offset:] if limit < 0 else rows[offset : offset + limit]
