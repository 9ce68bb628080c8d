"""`MemoryQueries`: the memory store's queries, counts and resources."""

from collections.abc import Callable
from math import inf
from operator import attrgetter
from typing import TypeVar

from rollwright.forks import bind_to_process
from rollwright.store import calls
from rollwright.store.backend import Backend, handles
from rollwright.store.checks import new_id
from rollwright.store.errors import StoreError
from rollwright.store.memory.resources import ResourceVersions
from rollwright.store.memory.rows import StoredRollout
from rollwright.store.memory.state import StoreState
from rollwright.store.records import (
    Attempt,
    Event,
    Page,
    ResourcesUpdate,
    Rollout,
    RolloutStatus,
    WorkerRecord,
)
from rollwright.store.waiting import LoopClock

Row = TypeVar("Row")


class MemoryQueries(Backend):
    """Handlers of the calls that change no rollout."""

    def __init__(self, *, clock: Callable[[], float] | None = None, record_events: bool = True) -> None:
        bind_to_process(self)  # a fork would have a copy that diverges
        self._clock = clock if clock is not None else LoopClock()
        self._state = StoreState(record_events=record_events)
        self._resources = ResourceVersions()
        self._timer_at = inf
        """When the next lease is checked without a call, by the store's clock; never later than the first expiry."""
        self._closed = False

    def _begin(self) -> float:
        """The time of the call that begins; leases that expired by then are ended before anything else happens."""
        if self._closed:
            raise StoreError("the store is closed")
        now = self._clock()
        if self._timer_at <= now and self._state.leases.bound <= now and self._state.expire(now):
            self._settle()
        return now

    def _settle(self) -> None:
        """Wakes the calls that wait for a change that was just made."""

    @handles(calls.GetRolloutById)
    async def _get_rollout_by_id(self, call: calls.GetRolloutById) -> Rollout | None:
        self._begin()
        row = self._state.rollouts.get(call.rollout_id)
        return None if row is None else row.record()

    @handles(calls.GetLatestAttempt)
    async def _get_latest_attempt(self, call: calls.GetLatestAttempt) -> Attempt | None:
        self._begin()
        row = self._state.rollouts.get(call.rollout_id)
        return row.attempts[-1].record() if row is not None and row.attempts else None

    @handles(calls.QueryRollouts)
    async def _query_rollouts(self, call: calls.QueryRollouts) -> Page[Rollout]:
        self._begin()
        rows = self._matching(call)
        total = len(rows)
        if call.limit != 0:
            rows = _ordered(rows, call.sort_by, call.sort_order)
        records = [row.record() for row in _cut(rows, call.limit, call.offset)]
        return Page(records, total, call.limit, call.offset)

    def _matching(self, call: calls.QueryRollouts) -> list[StoredRollout]:
        """The rows that pass every filter that is given, in no particular order."""
        state, statuses, contains, mode = self._state, call.status, call.rollout_id_contains, call.mode
        if call.rollout_ids is not None:
            wanted = dict.fromkeys(call.rollout_ids)
            rows = [state.rollouts[each] for each in wanted if each in state.rollouts]
            if statuses is not None:
                rows = [row for row in rows if row.status in statuses]
        elif statuses is not None:
            rows = [row for each in statuses for row in state.by_status[each].values()]
        else:
            rows = list(state.rollouts.values())
        if contains:
            rows = [row for row in rows if contains in row.rollout_id]
        if mode is not None:
            rows = [row for row in rows if row.mode == mode]
        return rows

    @handles(calls.QueryAttempts)
    async def _query_attempts(self, call: calls.QueryAttempts) -> Page[Attempt]:
        self._begin()
        attempts = self._state.rollout(call.rollout_id).attempts
        rows = attempts if call.sort_order == "asc" else attempts[::-1]
        records = [row.record() for row in _cut(rows, call.limit, call.offset)]
        return Page(records, len(rows), call.limit, call.offset)

    @handles(calls.QueryWorkers)
    async def _query_workers(self, call: calls.QueryWorkers) -> Page[WorkerRecord]:
        now = self._begin()
        workers = self._state.workers.workers
        names = sorted(workers)
        if call.status is None:
            records = [workers[name].record(now) for name in _cut(names, call.limit, call.offset)]
            return Page(records, len(names), call.limit, call.offset)
        records = [workers[name].record(now) for name in names]
        records = [record for record in records if record.status in call.status]
        return Page(_cut(records, call.limit, call.offset), len(records), call.limit, call.offset)

    @handles(calls.GetWorkerById)
    async def _get_worker_by_id(self, call: calls.GetWorkerById) -> WorkerRecord | None:
        now = self._begin()
        worker = self._state.workers.workers.get(call.worker_id)
        return None if worker is None else worker.record(now)

    @handles(calls.Statistics)
    async def _statistics(self, call: calls.Statistics) -> dict[str, int]:
        self._begin()
        state = self._state
        counts = {str(status): len(rows) for status, rows in state.by_status.items()}
        return counts | {
            "attempts": state.attempts,
            "workers": len(state.workers.workers),
            "completions": state.log.last,
        }

    @handles(calls.GetTrajectories)
    async def _get_trajectories(self, call: calls.GetTrajectories) -> dict[str, bytes]:
        self._begin()
        shown = {RolloutStatus.SUCCEEDED, RolloutStatus.FAILED} if call.failed else {RolloutStatus.SUCCEEDED}
        found = {}
        for rollout_id in call.rollout_ids:
            row = self._state.rollouts.get(rollout_id)
            if row is not None and row.status in shown and row.trajectory is not None:
                found[rollout_id] = row.trajectory
        return found

    @handles(calls.ReadJournal)
    async def _read_journal(self, call: calls.ReadJournal) -> list[bytes]:
        self._begin()
        return list(self._state.rollout(call.rollout_id).journal or ())

    @handles(calls.ReadEvents)
    async def _read_events(self, call: calls.ReadEvents) -> list[Event]:
        self._begin()
        return self._state.events.after(call.after, call.limit)

    @handles(calls.AddResources)
    async def _add_resources(self, call: calls.AddResources) -> ResourcesUpdate:
        name = new_id("rs") if call.resources_id is None else call.resources_id
        return self._resources.add(name, call.resources, self._begin())

    @handles(calls.UpdateResources)
    async def _update_resources(self, call: calls.UpdateResources) -> ResourcesUpdate:
        return self._resources.update(call.resources_id, call.resources, self._begin())

    @handles(calls.GetResourcesById)
    async def _get_resources_by_id(self, call: calls.GetResourcesById) -> ResourcesUpdate | None:
        self._begin()
        return self._resources.get(call.resources_id, call.version)

    @handles(calls.GetLatestResources)
    async def _get_latest_resources(self, call: calls.GetLatestResources) -> ResourcesUpdate | None:
        self._begin()
        return self._resources.latest()

    @handles(calls.QueryResources)
    async def _query_resources(self, call: calls.QueryResources) -> Page[ResourcesUpdate]:
        part = call.resources_id_contains or ""
        self._begin()
        names = [each for each in self._resources.ids() if part in each]
        newest = [self._resources.get(name, None) for name in _cut(names, call.limit, call.offset)]
        return Page([each for each in newest if each is not None], len(names), call.limit, call.offset)


def _ordered(rows: list[StoredRollout], sort_by: str, sort_order: str) -> list[StoredRollout]:
    """By a field, then by arrival; rows without a value come last in either order.

    Sorts by arrival first, which most rows are in already, and then by the field alone: the sort is stable, and comparing
    numbers or strings is several times faster than comparing tuples.
    """
    backwards = sort_order == "desc"
    rows.sort(key=_place, reverse=backwards)
    field = attrgetter(sort_by)
    valued = [row for row in rows if field(row) is not None]
    empty = [] if len(valued) == len(rows) else [row for row in rows if field(row) is None]
    valued.sort(key=field, reverse=backwards)
    return valued + empty


_place = attrgetter("place")


def _cut(rows: list[Row], limit: int, offset: int) -> list[Row]:
    return rows[offset:] if limit < 0 else rows[offset : offset + limit]
