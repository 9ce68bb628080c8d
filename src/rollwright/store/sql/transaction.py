"""The rows that a transaction gathers while its operations run, and writes together at its end.

Many operations of different callers share a transaction. Their worker stamps, events and completions are written last,
always in this order, and the counter of the completion log after all of them. Two transactions that lock such rows
therefore lock them in the same order and cannot deadlock.
"""

from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

from sqlalchemy import Table, bindparam, exists, func, select, union_all, update

from rollwright.store.checks import EMPTY
from rollwright.store.records import AttemptStatus, EventKind, RolloutStatus
from rollwright.store.sql.rows import RolloutRow
from rollwright.store.sql.schema import HELD, completions, counters, events, rollouts, workers
from rollwright.store.sql.statements import Operation, Statement, Values, constant, insert_into

COMPLETIONS = "completions"
"""Name of the completion log's counter."""

STAMP_SECONDS = 1.0
"""How long a worker's sign of life may wait before it is written. Only queries of workers read it, and they write pending
ones first; other processes see it this much later."""


MOST_HELD = 8192
"""Most rows in memory, of a few hundred bytes each: more rollouts than a process plays at a time."""


@dataclass(slots=True)
class Changes:
    """The changes of a transaction that waiting calls depend on."""

    waiting: bool = False
    """A rollout entered the queue."""
    completed: bool = False
    """The completion log grew."""
    taken: bool = False
    """An attempt was taken from its worker."""
    lease: float = inf
    """The earliest end of a lease that was granted or extended."""


@dataclass(slots=True)
class _Stamp:
    """New values of a worker's row, in the order of the columns; `None`: unchanged."""

    worker_id: str
    heartbeat_stats: bytes | None = None
    last_heartbeat_time: float = 0.0
    last_dequeue_time: float | None = None
    last_busy_time: float | None = None


class HeldRows(dict[str, RolloutRow]):
    """A cache of rollouts that an attempt holds, by id, equal to their rows in the database but without their inputs.

    A driver may keep it from one transaction to the next only while no other process can have changed the rows. Every
    change of a held rollout updates its entry or removes it; a missing entry is read from the database.
    """

    def keep(self, row: RolloutRow) -> None:
        if len(self) >= MOST_HELD:
            self.clear()
        self[row.rollout_id] = row

    def forget(self, rollout_id: str) -> None:
        self.pop(rollout_id, None)


class Stamps:
    """Signs of life of workers that are not yet written; one object per store, for all its transactions."""

    def __init__(self) -> None:
        self._stamps: dict[str, _Stamp] = {}
        self._released: dict[str, float] = {}
        self._since = inf

    def __bool__(self) -> bool:
        return self._since < inf

    def record(
        self,
        worker_id: str | None,
        now: float,
        *,
        asks: bool = False,
        busy: bool = False,
        stats: bytes | None = None,
    ) -> None:
        """Records a sign of life: the worker asks for rollouts, got one, or sent its statistics."""
        if worker_id is None:
            return
        stamp = self._stamps.get(worker_id)
        if stamp is None:
            stamp = self._stamps[worker_id] = _Stamp(worker_id)
            self._since = min(self._since, now)
        stamp.last_heartbeat_time = now
        if asks:
            stamp.last_dequeue_time = now
        if busy:
            stamp.last_busy_time = now
        if stats is not None:
            stamp.heartbeat_stats = stats

    def record_release(self, worker_id: str | None, now: float) -> None:
        """Records that the worker holds one attempt less; its idle time is written only if it holds none by then."""
        if worker_id is not None:
            self._released[worker_id] = now
            self._since = min(self._since, now)

    def write(self, now: float, *, at_once: bool) -> Operation[None]:
        if not at_once and self._since + STAMP_SECONDS > now:
            return
        stamps, released = self._stamps, self._released
        self._stamps, self._released, self._since = {}, {}, inf
        if stamps:
            yield UPSERT_WORKER.many([asdict(stamps[name]) for name in sorted(stamps)])
        if released:
            yield IDLE_WORKER.many([{"worker": name, "now": released[name]} for name in sorted(released)])


@dataclass(slots=True)
class Transaction:
    """One transaction: its time, and the rows and changes that its operations gather."""

    now: float
    """The store's time, the same for all operations of the transaction."""
    stamps: Stamps
    repeated: bool = False
    """Whether the same operations ran before, with an unknown outcome of the commit."""
    stamps_at_once: bool = False
    alone: bool = False
    """Whether no other write transaction is open at the same time, in any process."""
    held: HeldRows = field(default_factory=HeldRows)
    changes: Changes = field(default_factory=Changes)
    _events: list[tuple[Statement, list[Values]]] = field(default_factory=list)
    """In their order; consecutive events of one kind share a statement."""
    _completions: list[tuple[Any, ...]] = field(default_factory=list)
    _reasons: list[str | None] = field(default_factory=list)
    """The reasons of the completions; most have none."""
    _later: dict[Statement, list[Values]] = field(default_factory=dict)

    def log_event(
        self,
        kind: EventKind,
        rollout_id: str,
        attempt_id: str | None = None,
        worker_id: str | None = None,
        status: str | None = None,
        lease_expires: float | None = None,
        becomes: str | None = None,
    ) -> None:
        """Takes statuses as plain strings: an enum is bound more slowly."""
        self._log(
            INSERT_EVENT,
            (self.now, kind._value_, rollout_id, attempt_id, worker_id, status, lease_expires, becomes),
        )

    def log_enqueued(self, rollout_id: str) -> None:
        self._log(INSERT_ENQUEUED, (self.now, rollout_id))

    def log_claimed(
        self, rollout_id: str, attempt_id: str, worker_id: str | None, lease_expires: float | None
    ) -> None:
        self._log(INSERT_CLAIMED, (self.now, rollout_id, attempt_id, worker_id, lease_expires))

    def log_ended(
        self,
        rollout_id: str,
        attempt_id: str,
        worker_id: str | None,
        status: AttemptStatus,
        lease_expires: float | None,
        becomes: RolloutStatus,
    ) -> None:
        values = (self.now, rollout_id, attempt_id, worker_id, status._value_, lease_expires, becomes._value_)
        self._log(INSERT_ENDED, values)

    def _log(self, insert: Statement, values: Values) -> None:
        if self._events and self._events[-1][0] is insert:
            self._events[-1][1].append(values)
        else:
            self._events.append((insert, [values]))

    def complete(
        self, place: int, rollout_id: str, attempt_id: str | None, status: RolloutStatus, reason: str | None
    ) -> None:
        self._completions.append((place, rollout_id, attempt_id, status._value_, self.now))
        self._reasons.append(reason)
        self.changes.completed = True

    def insert_later(self, insert: Statement, values: Values) -> None:
        """Inserts a row at the end, together with others; call `write_inserts` before reading its table."""
        self._later.setdefault(insert, []).append(values)

    def write_inserts(self) -> Operation[None]:
        for insert, values in self._later.items():
            yield insert.many(values)
        self._later = {}

    def note_lease(self, lease_expires: float | None) -> None:
        if lease_expires is not None and lease_expires < self.changes.lease:
            self.changes.lease = lease_expires

    def write_gathered(self) -> Operation[None]:
        yield from self.write_inserts()
        yield from self.stamps.write(self.now, at_once=self.stamps_at_once)
        for insert, values in self._events:
            yield insert.many(values)
        if self._completions:
            yield from self._number_completions()
        self._events, self._completions, self._reasons = [], [], []

    def _number_completions(self) -> Operation[None]:
        if self.alone and self._reasons.count(None) == len(self._reasons):
            yield APPEND_WITHOUT_REASON.many(self._completions)
            return
        pairs = zip(self._completions, self._reasons, strict=True)
        rows = [(*known, reason, end_time) for (*known, end_time), reason in pairs]
        if self.alone:
            yield APPEND_COMPLETION.many(rows)
            return
        yield COUNT(count=len(rows))
        yield INSERT_COMPLETION.many([(len(rows) - number, *row) for number, row in enumerate(rows, 1)])


def _others(table: Table, *names: str) -> list[str]:
    return [column.name for column in table.columns if column.name not in names]


_stats = bindparam("heartbeat_stats", type_=workers.c.heartbeat_stats.type)
_new = insert_into(workers).values(
    heartbeat_stats=func.coalesce(_stats, EMPTY), last_idle_time=bindparam("last_heartbeat_time")
)
UPSERT_WORKER = Statement(
    _new.on_conflict_do_update(
        index_elements=["worker_id"],
        set_={
            "heartbeat_stats": func.coalesce(_stats, workers.c.heartbeat_stats),
            "last_heartbeat_time": _new.excluded.last_heartbeat_time,
            "last_dequeue_time": func.coalesce(_new.excluded.last_dequeue_time, workers.c.last_dequeue_time),
            "last_busy_time": func.coalesce(_new.excluded.last_busy_time, workers.c.last_busy_time),
        },
    )
)
IDLE_WORKER = Statement(
    update(workers)
    .where(
        workers.c.worker_id == bindparam("worker"),
        ~exists(select(1).select_from(rollouts).where(rollouts.c.worker_id == workers.c.worker_id, HELD)),
    )
    .values(last_idle_time=bindparam("now"))
)
INSERT_EVENT = Statement(insert_into(events, "sequence"))
INSERT_ENQUEUED = Statement(
    insert_into(events, *_others(events, "time", "rollout_id")).values(
        kind=constant(EventKind.ENQUEUED.value)
    )
)
INSERT_CLAIMED = Statement(
    insert_into(
        events, *_others(events, "time", "rollout_id", "attempt_id", "worker_id", "lease_expires")
    ).values(kind=constant(EventKind.CLAIMED.value))
)
INSERT_ENDED = Statement(insert_into(events, "sequence", "kind").values(kind=constant(EventKind.ENDED.value)))
"""These omit the columns that stay empty: SQLite's driver takes as long to bind an empty value as any other."""
_is_last_cursor = counters.c.name == constant(COMPLETIONS)
COUNT = Statement(update(counters).where(_is_last_cursor).values(value=counters.c.value + bindparam("count")))
INSERT_COMPLETION = Statement(
    insert_into(completions).values(
        cursor=select(counters.c.value).where(_is_last_cursor).scalar_subquery()
        - bindparam("before_last", type_=completions.c.cursor.type)
    )
)
"""Counts back from the counter's value, which saves a query for it."""
_counter = select(counters.c.value).where(_is_last_cursor)
_last_left = select(func.coalesce(func.max(completions.c.cursor), constant(0)))
_given = union_all(_counter, _last_left).subquery("given")
LAST_GIVEN = select(func.max(_given.c.value))
"""The last cursor that was assigned."""
_next_cursor = func.max(_counter.scalar_subquery(), _last_left.scalar_subquery()) + constant(1)
APPEND_COMPLETION = Statement(insert_into(completions).values(cursor=_next_cursor))
APPEND_WITHOUT_REASON = Statement(insert_into(completions, "reason").values(cursor=_next_cursor))
"""For SQLite, whose `max` also takes two values. Saves writing the page of the counter."""
