"""What a transaction gathers while its operations run, and writes at its end in one go.

Many operations of different callers share a transaction. Their events, the stamps of their workers and their
completions are written once, last, and always in this order: workers by id, events, then the counter of
the completion log. Two transactions that both wait for such rows therefore wait in the same order and
cannot block each other.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Any

from sqlalchemy import bindparam, exists, func, select, update
from sqlalchemy.dialects.postgresql import insert as upsert

from rollwright.store.checks import EMPTY
from rollwright.store.records import EventKind
from rollwright.store.sql.schema import attempts, completions, counters, events, workers
from rollwright.store.sql.statements import Operation, Statement, insert_into

COMPLETIONS = "completions"
"""Name of the counter."""


@dataclass
class Changes:
    """What others may be waiting for."""

    waiting: bool = False
    """A rollout came into the queue."""
    completed: bool = False
    """The completion log grew."""
    taken: bool = False
    """An attempt was taken from its worker."""
    lease: float = inf
    """The earliest end of a lease that was given or extended."""


@dataclass
class Transaction:
    repeated: bool = False
    """Whether the same operations were run before, and nobody knows if they were committed."""
    changes: Changes = field(default_factory=Changes)
    _events: list[dict[str, Any]] = field(default_factory=list)
    _completions: list[dict[str, Any]] = field(default_factory=list)
    _workers: dict[str, dict[str, Any]] = field(default_factory=dict)
    _released: dict[str, float] = field(default_factory=dict)

    def event(
        self,
        time: float,
        kind: EventKind,
        rollout_id: str,
        attempt_id: str | None = None,
        worker_id: str | None = None,
        status: str | None = None,
        lease_expires: float | None = None,
    ) -> None:
        self._events.append(
            {
                "time": time,
                "kind": kind,
                "rollout_id": rollout_id,
                "attempt_id": attempt_id,
                "worker_id": worker_id,
                "status": status,
                "lease_expires": lease_expires,
            }
        )

    def complete(self, completion: dict[str, Any]) -> None:
        self._completions.append(completion)
        self.changes.completed = True

    def heard(self, worker_id: str | None, now: float, **stamps: Any) -> None:
        """A sign of life, with what else is to be written of the worker."""
        if worker_id is not None:
            stamp = self._workers.setdefault(worker_id, {"worker_id": worker_id, **_NO_STAMPS})
            stamp["last_heartbeat_time"] = now
            stamp.update(stamps)

    def released(self, worker_id: str | None, now: float) -> None:
        if worker_id is not None:
            self._released[worker_id] = now

    def leased(self, lease_expires: float | None) -> None:
        if lease_expires is not None and lease_expires < self.changes.lease:
            self.changes.lease = lease_expires

    def flush(self) -> Operation[None]:
        if self._workers:
            yield UPSERT_WORKER.many([self._workers[name] for name in sorted(self._workers)])
        if self._released:
            yield IDLE_WORKER.many(
                [{"worker": name, "now": self._released[name]} for name in sorted(self._released)]
            )
        if self._events:
            yield INSERT_EVENT.many(self._events)
        if self._completions:
            [[last]] = yield COUNT(count=len(self._completions))
            first = last - len(self._completions) + 1
            yield INSERT_COMPLETION.many(
                [{**row, "cursor": cursor} for cursor, row in enumerate(self._completions, first)]
            )
        self._workers, self._released, self._events, self._completions = {}, {}, [], []


_NO_STAMPS = {"heartbeat_stats": None, "last_dequeue_time": None, "last_busy_time": None}

_new = upsert(workers).values(
    worker_id=bindparam("worker_id"),
    heartbeat_stats=func.coalesce(bindparam("heartbeat_stats", type_=workers.c.heartbeat_stats.type), EMPTY),
    last_heartbeat_time=bindparam("last_heartbeat_time"),
    last_dequeue_time=bindparam("last_dequeue_time"),
    last_busy_time=bindparam("last_busy_time"),
    last_idle_time=bindparam("last_heartbeat_time"),
)
UPSERT_WORKER = Statement(
    _new.on_conflict_do_update(
        index_elements=["worker_id"],
        set_={
            "heartbeat_stats": func.coalesce(
                bindparam("heartbeat_stats", type_=workers.c.heartbeat_stats.type), workers.c.heartbeat_stats
            ),
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
        ~exists(select(1).where(attempts.c.worker_id == workers.c.worker_id, attempts.c.end_time.is_(None))),
    )
    .values(last_idle_time=bindparam("now"))
)
INSERT_EVENT = Statement(insert_into(events, "sequence"))
INSERT_COMPLETION = Statement(insert_into(completions))
COUNT = Statement(
    update(counters)
    .where(counters.c.name == COMPLETIONS)
    .values(value=counters.c.value + bindparam("count"))
    .returning(counters.c.value)
)
