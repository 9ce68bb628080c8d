"""Read-only operations: queries, counts, logs, and the state that waiting calls depend on."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Select, bindparam, exists, func, select

from rollwright.store.checks import unpack
from rollwright.store.errors import NotFound
from rollwright.store.records import (
    Attempt,
    CompletionEntry,
    Event,
    EventKind,
    Page,
    Rollout,
    RolloutStatus,
    WorkerRecord,
    WorkerStatus,
)
from rollwright.store.sql import schema
from rollwright.store.sql.attempts import ENDED
from rollwright.store.sql.queue import ROLLOUTS
from rollwright.store.sql.rows import ROLLOUT_COLUMNS, AttemptRow, RolloutRow
from rollwright.store.sql.schema import (
    attempts,
    completions,
    events,
    journal,
    rollouts,
    trajectories,
    workers,
)
from rollwright.store.sql.statements import NOW, Operation, Statement, any_of
from rollwright.store.sql.transaction import LAST_GIVEN
from rollwright.store.transitions import FINAL_ROLLOUT, HELD, WAITING, worker_status

NO_LIMIT = 2**62
"""More rows than any table has, because the dialects differ in their syntax for "all"."""


def find_rollouts(rollout_ids: Sequence[str]) -> Operation[dict[str, Rollout]]:
    rows = yield ROLLOUTS(ids=list(rollout_ids))
    return {row[1]: RolloutRow(*row).record() for row in rows}


def query_rollouts(
    statuses: Sequence[RolloutStatus] | None,
    rollout_ids: Sequence[str] | None,
    contains: str | None,
    mode: str | None,
    sort_by: str,
    sort_order: str,
    limit: int,
    offset: int,
) -> Operation[Page[Rollout]]:
    given: dict[str, Any] = {"statuses": statuses, "ids": rollout_ids, "part": contains or None, "mode": mode}
    filters = {name: value for name, value in given.items() if value is not None}
    count, page = _rollout_query(frozenset(filters), _phase(statuses), sort_by, sort_order)
    [[total]] = yield count(**filters)
    rows = [] if limit == 0 else (yield page(**filters, count=limit if limit > 0 else NO_LIMIT, skip=offset))
    return Page([RolloutRow(*row).record() for row in rows], total, limit, offset)


_completed = select(completions.c.place).where(any_of(completions.c.status, "statuses"))
_PHASES: tuple[tuple[frozenset[RolloutStatus], Any], ...] = (
    (WAITING, schema.WAITING),
    (HELD, schema.HELD),
    (FINAL_ROLLOUT, rollouts.c.place.in_(_completed)),
)


def _phase(statuses: Sequence[RolloutStatus] | None) -> int | None:
    """The number of the phase that all statuses belong to, if any; a phase has an index, or the completion log."""
    for number, (phase, _) in enumerate(_PHASES):
        if statuses and phase.issuperset(statuses):
            return number
    return None


@lru_cache(maxsize=256)
def _rollout_query(
    filters: frozenset[str], phase: int | None, sort_by: str, sort_order: str
) -> tuple[Statement, Statement]:
    """The statements for the number of matches and for one page of them."""
    conditions: dict[str, ColumnElement[bool]] = {
        "statuses": any_of(rollouts.c.status, "statuses"),
        "ids": any_of(rollouts.c.rollout_id, "ids"),
        "part": func.replace(rollouts.c.rollout_id, bindparam("part"), "") != rollouts.c.rollout_id,
        "mode": rollouts.c.mode == bindparam("mode"),
    }
    where: list[Any] = [conditions[name] for name in sorted(filters)]
    if phase is not None:
        where.append(_PHASES[phase][1])
    field = rollouts.c[sort_by]
    keys = [field, rollouts.c.place]
    order = [key.desc() if sort_order == "desc" else key.asc() for key in keys]
    found: Select[Any] = select(*ROLLOUT_COLUMNS).where(*where).order_by(field.is_(None), *order)
    return (
        Statement(select(func.count()).select_from(rollouts).where(*where)),
        Statement(found.limit(bindparam("count")).offset(bindparam("skip"))),
    )


def latest_attempt(rollout_id: str) -> Operation[Attempt | None]:
    attempts = yield from _attempts(rollout_id)
    return attempts[-1] if attempts else None


def query_attempts(rollout_id: str, sort_order: str, limit: int, offset: int) -> Operation[Page[Attempt]]:
    found = yield from _attempts(rollout_id)
    if found is None:
        raise NotFound(f"no rollout {rollout_id!r}")
    if sort_order == "desc":
        found.reverse()
    return Page(found[offset : None if limit < 0 else offset + limit], len(found), limit, offset)


def _attempts(rollout_id: str) -> Operation[list[Attempt] | None]:
    """The ended attempts and the current one, in order; `None` if there is no such rollout."""
    rows = yield ROLLOUTS(ids=[rollout_id])
    if not rows:
        return None
    row = RolloutRow(*rows[0])
    ended = yield ENDED(at_place=row.place)
    found = [AttemptRow(*each).record(rollout_id) for each in ended]
    if row.attempt_id is not None:
        found.append(row.attempt())
    return found


def query_workers(
    statuses: Sequence[WorkerStatus] | None, limit: int, offset: int
) -> Operation[Page[WorkerRecord]]:
    """Reads all workers and filters them here, because a worker's status depends on the time."""
    rows = yield WORKERS()
    found = yield from _workers(rows)
    matching = [worker for worker in found if statuses is None or worker.status in statuses]
    return Page(matching[offset : None if limit < 0 else offset + limit], len(matching), limit, offset)


def find_worker(worker_id: str) -> Operation[WorkerRecord | None]:
    rows = yield WORKER(worker_id=worker_id)
    found = yield from _workers(rows)
    return found[0] if found else None


def _workers(rows: Sequence[Sequence[Any]]) -> Operation[list[WorkerRecord]]:
    held: dict[str, list[tuple[str, str]]] = {}
    for worker_id, rollout_id, attempt_id in (yield HOLDINGS(ids=[row[0] for row in rows])):
        held.setdefault(worker_id, []).append((rollout_id, attempt_id))
    [[now]] = yield CLOCK()
    return list(_worker_records(rows, held, now))


def _worker_records(
    rows: Sequence[Sequence[Any]], held: dict[str, list[tuple[str, str]]], now: float
) -> Iterator[WorkerRecord]:
    for worker_id, stats, last_heartbeat, *times in rows:
        holds = held.get(worker_id, [])
        current = holds[-1] if holds else (None, None)
        status = worker_status(len(holds), last_heartbeat, now)
        yield WorkerRecord(worker_id, status, unpack(stats), last_heartbeat, *times, *current)


def statistics() -> Operation[dict[str, int]]:
    counts: dict[str, int] = {str(status): 0 for status in RolloutStatus}
    for statement in COUNT_ROLLOUTS:
        counts.update((status, count) for status, count in (yield statement()))
    [[ended]] = yield COUNT_ENDED()
    counts["attempts"] = ended + counts[RolloutStatus.PREPARING] + counts[RolloutStatus.RUNNING]
    [[counts["workers"]]] = yield COUNT_WORKERS()
    [[counts["completions"]]] = yield LAST_CURSOR()
    return counts


_STATUSES = {str(each): each for each in RolloutStatus}
"""By their names: to look one up is several times as fast as to call the type, and a resumed run reads the log repeatedly."""


def read_completions(after: int, limit: int) -> Operation[list[CompletionEntry]]:
    rows = yield COMPLETED(after=after, count=limit)
    return [
        CompletionEntry(row[0], row[1], row[2], _STATUSES.get(row[3]) or RolloutStatus(row[3]), row[4])
        for row in rows
    ]


def read_events(after: int, limit: int) -> Operation[list[Event]]:
    rows = yield EVENTS(after=after, count=limit)
    return [Event(row[0], row[1], EventKind(row[2]), *row[3:]) for row in rows]


def read_journal(rollout_id: str) -> Operation[list[bytes]]:
    rows = yield JOURNAL(rollout_id=rollout_id)
    if not rows and not (yield ROLLOUTS(ids=[rollout_id])):
        raise NotFound(f"no rollout {rollout_id!r}")
    return [row[0] for row in rows]


def get_trajectories(rollout_ids: Sequence[str], failed: bool) -> Operation[dict[str, bytes]]:
    shown = [RolloutStatus.SUCCEEDED, *([RolloutStatus.FAILED] if failed else [])]
    rows = yield TRAJECTORIES(ids=list(rollout_ids), statuses=shown)
    return {row[0]: row[1] for row in rows}


def statuses(rollout_ids: Sequence[str]) -> Operation[tuple[int, dict[str, str]]]:
    """The last cursor of the completion log, and the status of each rollout."""
    [[cursor]] = yield LAST_CURSOR()
    rows = yield STATUSES(ids=list(rollout_ids))
    return cursor, {row[0]: row[1] for row in rows}


def has_lost_attempts(worker_id: str) -> Operation[bool]:
    """Whether the worker has lost an attempt that was not reported to it."""
    return bool((yield UNREPORTED(worker_id=worker_id)))


def progress() -> Operation[tuple[bool, int, bool]]:
    """The state that waiting calls depend on: whether rollouts wait, the last cursor, whether lost attempts are unreported."""
    [[waiting, cursor, taken]] = yield PROGRESS()
    return bool(waiting), cursor, bool(taken)


def first_lease() -> Operation[tuple[float | None, float]]:
    """The end of the next lease to expire, and the current time."""
    [[lease]] = yield FIRST_LEASE()
    [[now]] = yield CLOCK()
    return lease, now


_last_cursor = LAST_GIVEN

CLOCK = Statement(select(NOW))
WORKERS = Statement(select(workers).order_by(workers.c.worker_id))
WORKER = Statement(select(workers).where(workers.c.worker_id == bindparam("worker_id")))
HOLDINGS = Statement(
    select(rollouts.c.worker_id, rollouts.c.rollout_id, rollouts.c.attempt_id)
    .where(any_of(rollouts.c.worker_id, "ids"), schema.HELD)
    .order_by(rollouts.c.attempt_start, rollouts.c.place)
)
COUNT_ROLLOUTS = [
    *(
        Statement(select(rollouts.c.status, func.count()).where(phase).group_by(rollouts.c.status))
        for phase in (schema.WAITING, schema.HELD)
    ),
    Statement(select(completions.c.status, func.count()).group_by(completions.c.status)),
]
COUNT_ENDED = Statement(select(func.count()).select_from(attempts))
COUNT_WORKERS = Statement(select(func.count()).select_from(workers))
LAST_CURSOR = Statement(_last_cursor)
STATUSES = Statement(
    select(rollouts.c.rollout_id, rollouts.c.status).where(any_of(rollouts.c.rollout_id, "ids"))
)
UNREPORTED = Statement(
    select(1)
    .select_from(attempts)
    .where(attempts.c.worker_id == bindparam("worker_id"), schema.UNREPORTED)
    .limit(1)
)
COMPLETED = Statement(
    select(
        completions.c.cursor,
        completions.c.rollout_id,
        completions.c.attempt_id,
        completions.c.status,
        completions.c.reason,
    )
    .where(completions.c.cursor > bindparam("after"))
    .order_by(completions.c.cursor)
    .limit(bindparam("count"))
)
EVENTS = Statement(
    select(events)
    .where(events.c.sequence > bindparam("after"))
    .order_by(events.c.sequence)
    .limit(bindparam("count"))
)
JOURNAL = Statement(
    select(journal.c.data)
    .join_from(rollouts, journal, journal.c.place == rollouts.c.place)
    .where(rollouts.c.rollout_id == bindparam("rollout_id"))
    .order_by(journal.c.position)
)
TRAJECTORIES = Statement(
    select(rollouts.c.rollout_id, trajectories.c.data)
    .join_from(rollouts, trajectories, trajectories.c.place == rollouts.c.place)
    .where(any_of(rollouts.c.rollout_id, "ids"), any_of(rollouts.c.status, "statuses"))
)
PROGRESS = Statement(
    select(
        exists(select(1).select_from(rollouts).where(schema.WAITING)),
        _last_cursor.scalar_subquery(),
        exists(select(1).select_from(attempts).where(schema.UNREPORTED)),
    )
)
FIRST_LEASE = Statement(select(func.min(rollouts.c.lease_expires)).where(schema.HELD))
