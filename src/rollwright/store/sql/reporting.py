"""The operations of a worker: reports on attempts, heartbeats, the turn journal; and housekeeping.

As in `queueing`, a call that is refused has written nothing but that fact.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeGuard

from sqlalchemy import ColumnElement, Double, bindparam, delete, literal_column, or_, select, update

from rollwright.store.checks import EMPTY, LATEST, config_from_bytes, merged
from rollwright.store.contract import AttemptRefused, ImpossibleChange, NotFound, StoreError
from rollwright.store.records import Attempt, AttemptedRollout, AttemptStatus, EventKind, RolloutStatus
from rollwright.store.sql.changes import CLEAR_JOURNAL, end, heard, lease_from, noted
from rollwright.store.sql.rows import ATTEMPT_COLUMNS, RULE_COLUMNS, AttemptRow, RolloutRow
from rollwright.store.sql.schema import (
    HELD,
    UNTOLD,
    attempts,
    completions,
    events,
    journal,
    rollouts,
    trajectories,
)
from rollwright.store.sql.statements import Operation, Row, Statement, Values, any_of, constant, insert_into
from rollwright.store.sql.transaction import Transaction
from rollwright.store.transitions import (
    FINAL_ATTEMPT,
    FINAL_ROLLOUT,
    SAME_MOMENT,
    check_attempt_change,
    is_news,
    lapsed,
    lease_end,
)

Pair = tuple[str, str]
"""A rollout and an attempt."""
Held = tuple[str, Pair]
"""A worker, and what it plays."""
Turn = tuple[str, str, bytes]
"""A rollout, an attempt, and what is journalled."""
Beat = tuple[str, bytes | None, Sequence[Pair] | None]
"""A worker's sign of life: its figures, packed, and the attempts that it plays; `None`: all that it holds."""

EVENTS_AT_ONCE = 100_000
"""Events forgotten with one call, three for each rollout that one call of `delete_finished` forgets and some more."""


def report(
    tx: Transaction,
    rollout_id: str,
    attempt_id: str,
    *,
    status: AttemptStatus | None,
    worker_id: str | None,
    trajectory: bytes | None,
    reason: str | None,
    metadata: Mapping[str, Any] | None,
) -> Operation[Attempt]:
    row = yield from _find(rollout_id)
    ended = yield from _ended(tx, row, attempt_id)
    if ended is not None:
        if status is not None and ended.status is status:
            return ended
        _refuse_ended(tx, ended, status)
    _require_held(tx, row, worker_id, status)
    if status is not None and status != row.status:
        check_attempt_change(attempt_id, row.attempt_status, status)
    packed = merged(row.attempt_metadata or EMPTY, metadata, "metadata")
    if status is not None and status in FINAL_ATTEMPT:
        last = noted(row, tx.now, worker_id=worker_id, metadata=packed)
        tx.stamps.heard(last.worker_id, tx.now)
        return (yield from end(tx, last, status, reason, trajectory=trajectory))
    after = yield from heard(tx, row, worker_id=worker_id, status=status, metadata=packed)
    return after.attempt()


def give_back(tx: Transaction, claimed: Sequence[AttemptedRollout], reason: str) -> Operation[None]:
    """Puts rollouts back into the queue whose claim nobody will ever read."""
    for each in claimed:
        row = yield from _find(each.rollout_id)
        if row.attempt_id == each.attempt.attempt_id:
            yield from end(tx, row, AttemptStatus.CANCELLED, reason)


def heartbeats(tx: Transaction, beats: Sequence[Beat]) -> Operation[list[list[Pair]]]:
    """Several callers'; each learns what it does not hold any more."""
    kept = yield from _extend_each(tx, [(worker, pairs[0]) for worker, _, pairs in beats if _is_one(pairs)])
    lost: list[list[Pair]] = []
    for worker_id, stats, pairs in beats:
        if _is_one(pairs) and (worker_id, pairs[0]) in kept:
            tx.stamps.heard(worker_id, tx.now, stats=stats)
            lost.append([])
        else:
            lost.append((yield from heartbeat(tx, worker_id, stats, pairs)))
    return lost


def _is_one(pairs: Sequence[Pair] | None) -> TypeGuard[Sequence[Pair]]:
    return pairs is not None and len(pairs) == 1


def _extend_each(tx: Transaction, asked: Sequence[Held]) -> Operation[set[Held]]:
    """One attempt of each worker; returns those that are alive and that worker's. A lease that was extended a moment
    ago is left as it is, which writes nothing."""
    if not asked:
        return set()
    values = [(tx.now, worker_id, rollout_id, attempt_id) for worker_id, (rollout_id, attempt_id) in asked]
    kept: set[Held] = set()
    extended: list[Values] = []
    for worker_id, rollout_id, attempt_id, place, start, heard_at, packed in (yield ALIVE.many(values)):
        kept.add((worker_id, (rollout_id, attempt_id)))
        config = config_from_bytes(packed)
        if is_news(config, heard_at, tx.now):
            lease = lease_end(config, start, tx.now)
            extended.append({"at_place": place, "now": tx.now, "new_lease": lease})
            tx.leased(lease)
    if extended:
        yield KEEP.many(extended)
    return kept


def heartbeat(
    tx: Transaction, worker_id: str, stats: bytes | None, pairs: Sequence[Pair] | None
) -> Operation[list[Pair]]:
    adopted: list[Row] = []
    if pairs is None:
        rows = yield EXTEND_ALL(worker=worker_id, now=tx.now)
    else:
        rows = (yield EXTEND(worker=worker_id, now=tx.now, **_by_column(pairs))) if pairs else []
    kept = {(row[0], row[1]) for row in rows}
    missing = [pair for pair in pairs or () if pair not in kept]
    if missing:
        adopted = yield ADOPT(worker=worker_id, now=tx.now, **_by_column(missing))
        rows = [*rows, *adopted]
        kept |= {(row[0], row[1]) for row in adopted}
        kept |= {
            (row[0], row[1]) for row in (yield HELD_OF(worker=worker_id, now=tx.now, **_by_column(missing)))
        }
    tx.stamps.heard(worker_id, tx.now, busy=bool(adopted), stats=stats)
    for _, _, lease in rows:
        tx.leased(lease)
    return [pair for pair in missing if pair not in kept]


def _by_column(pairs: Sequence[Pair]) -> dict[str, list[str]]:
    return {
        "ids": [rollout_id for rollout_id, _ in pairs],
        "attempts": [attempt_id for _, attempt_id in pairs],
    }


def append_turns(tx: Transaction, turns: Sequence[Turn]) -> Operation[list[StoreError | None]]:
    """Several callers', one turn each, which are never asked for again. For attempts that were heard of a moment ago,
    as most were, the rollouts' rows stay as they are."""
    ids = [rollout_id for rollout_id, _, _ in turns]
    ready = {(row[1], row[2]): row[0] for row in (yield READY(ids=ids, now=tx.now, at=tx.now))}
    yield INSERT_JOURNAL.many(
        [(ready[pair], entry) for *given, entry in turns if (pair := tuple(given)) in ready]
    )
    refused: list[StoreError | None] = []
    for rollout_id, attempt_id, entry in turns:
        refusal = None
        if (rollout_id, attempt_id) not in ready:
            try:
                yield from append_journal(tx, rollout_id, attempt_id, [entry], None)
            except StoreError as error:
                refusal = error
        refused.append(refusal)
    return refused


def append_journal(
    tx: Transaction, rollout_id: str, attempt_id: str, entries: Sequence[bytes], append_id: str | None
) -> Operation[None]:
    """`append_id`: under which it may be asked for again; `None`: it never is."""
    row = yield from _holding(tx, rollout_id, attempt_id)
    if append_id is None or append_id != row.last_append_id:
        yield from heard(tx, row, status=AttemptStatus.RUNNING, append_id=append_id)
        yield INSERT_JOURNAL.many([(row.place, bytes(entry)) for entry in entries])


def clear_journal(tx: Transaction, rollout_id: str, attempt_id: str) -> Operation[None]:
    row = yield from _holding(tx, rollout_id, attempt_id)
    yield CLEAR_JOURNAL(at_place=row.place)
    yield from heard(tx, row)


def tell_taken(tx: Transaction, worker_id: str) -> Operation[list[tuple[str, str]]]:
    """What was taken from the worker since it was last told."""
    yield from tx.settle()
    rows = yield TAKEN(worker_id=worker_id)
    if rows:
        yield TOLD.many([{"at_place": row[2], "at_sequence": row[3]} for row in rows])
    return [(row[0], row[1]) for row in rows]


def write_stamps(tx: Transaction) -> Operation[None]:
    """Makes the signs of life of workers visible."""
    tx.stamps_at_once = True
    yield from ()


def release_trajectories(tx: Transaction, rollout_ids: Sequence[str]) -> Operation[int]:
    yield from tx.flush()  # a trajectory that is not yet written could not be deleted
    rows = yield RELEASE_TRAJECTORIES(ids=list(dict.fromkeys(rollout_ids)))
    return len(rows)


def delete_rollouts(tx: Transaction, rollout_ids: Sequence[str]) -> Operation[int]:
    yield from tx.flush()  # a completion that is not yet written could not be deleted
    rows = yield PLACES(ids=list(dict.fromkeys(rollout_ids)))
    for _, rollout_id, status in rows:
        if status not in FINAL_ROLLOUT:
            raise ImpossibleChange(f"rollout {rollout_id} is {status}; only a final one can be deleted")
    return (yield from _delete(tx, [(row[0], row[1]) for row in rows]))


def delete_finished(tx: Transaction, older_than: float, limit: int) -> Operation[int]:
    yield from tx.flush()
    old = []
    for place, rollout_id, end_time in (yield OLDEST(count=limit)):
        if end_time >= tx.now - older_than:
            break
        old.append((place, rollout_id))
    return (yield from _delete(tx, sorted(old)))


def _delete(tx: Transaction, rows: Sequence[tuple[int, str]]) -> Operation[int]:
    if rows:
        yield DELETE_COMPLETIONS(ids=[rollout_id for _, rollout_id in rows])
        for statement in DELETE_BY_PLACE:
            yield statement.many([{"at_place": place} for place, _ in rows])
    for _, rollout_id in rows:
        tx.event(EventKind.DELETED, rollout_id)
    yield from tx.flush()
    [[oldest]] = (yield OLDEST_START()) or [[tx.now]]
    last = None
    for sequence, time in (yield FIRST_EVENTS()):
        if time >= oldest:
            break
        last = sequence
    if last is not None:
        yield FORGET_EVENTS(last=last)
    return len(rows)


def _find(rollout_id: str) -> Operation[RolloutRow]:
    """The rollout, locked."""
    rows = yield FIND.many([(rollout_id,)])
    if not rows:
        raise NotFound(f"no rollout {rollout_id!r}")
    return RolloutRow(*rows[0])


def _ended(tx: Transaction, row: RolloutRow, attempt_id: str) -> Operation[Attempt | None]:
    """The attempt as it ended, or `None` if it is the one that holds the rollout."""
    if row.attempt_id is not None and attempt_id in (row.attempt_id, LATEST):
        return None
    yield from tx.settle()
    found = [AttemptRow(*each) for each in (yield ENDED(at_place=row.place))]
    for each in reversed(found):
        if attempt_id in (each.attempt_id, LATEST):
            return each.record(row.rollout_id)
    raise NotFound(f"rollout {row.rollout_id} has no attempt {attempt_id!r}")


def _holding(tx: Transaction, rollout_id: str, attempt_id: str) -> Operation[RolloutRow]:
    row = yield from _find(rollout_id)
    ended = yield from _ended(tx, row, attempt_id)
    if ended is not None:
        _refuse_ended(tx, ended, None)
    _require_held(tx, row, None, None)
    return row


def _refuse_ended(tx: Transaction, ended: Attempt, status: AttemptStatus | None) -> NoReturn:
    why = f"it is {ended.status}: {ended.reason}" if ended.reason else f"it is {ended.status}"
    _refuse(tx, ended, status, why)


def _require_held(
    tx: Transaction, row: RolloutRow, worker_id: str | None, status: AttemptStatus | None
) -> None:
    if lapsed(row.lease_expires, tx.now):
        _refuse(tx, row.attempt(), status, "its lease has just run out")
    if worker_id is not None and row.worker_id not in (worker_id, None):
        _refuse(tx, row.attempt(), status, f"worker {row.worker_id} holds it, not {worker_id}")


def _refuse(tx: Transaction, attempt: Attempt, status: AttemptStatus | None, why: str) -> NoReturn:
    tx.event(
        EventKind.REFUSED,
        attempt.rollout_id,
        attempt.attempt_id,
        attempt.worker_id,
        None if status is None else status._value_,
        attempt.lease_expires,
    )
    raise AttemptRefused(f"attempt {attempt.attempt_id} of rollout {attempt.rollout_id}: {why}")


FIND = Statement(
    select(*RULE_COLUMNS).where(rollouts.c.rollout_id == bindparam("rollout_id")).with_for_update()
)
ENDED = Statement(
    select(*ATTEMPT_COLUMNS).where(attempts.c.place == bindparam("at_place")).order_by(attempts.c.sequence_id)
)

_now: ColumnElement[float] = bindparam("now", type_=Double)
_worker: ColumnElement[str] = bindparam("worker", type_=rollouts.c.worker_id.type)
_alive: list[Any] = [HELD, or_(rollouts.c.lease_expires.is_(None), rollouts.c.lease_expires > _now)]
_own: Any = rollouts.c.worker_id == _worker
_one = [rollouts.c.rollout_id == bindparam("rollout_id"), rollouts.c.attempt_id == bindparam("attempt_id")]
_many = [any_of(rollouts.c.rollout_id, "ids"), any_of(rollouts.c.attempt_id, "attempts")]


def _extend(*conditions: Any, **also: Any) -> Statement:
    """Extends the leases of attempts that are alive. A row that another transaction has locked is passed over:
    it is being reported on in this moment, and to wait for it while holding others could block both."""
    free = select(rollouts.c.place).where(*_alive, *conditions).with_for_update(skip_locked=True)
    return Statement(
        update(rollouts)
        .where(rollouts.c.place.in_(select(free.cte("free").c.place)))
        .values(last_heartbeat_time=_now, lease_expires=lease_from(rollouts.c.attempt_start, _now), **also)
        .returning(rollouts.c.rollout_id, rollouts.c.attempt_id, rollouts.c.lease_expires)
    )


ALIVE = Statement(
    select(
        rollouts.c.worker_id,
        rollouts.c.rollout_id,
        rollouts.c.attempt_id,
        rollouts.c.place,
        rollouts.c.attempt_start,
        rollouts.c.last_heartbeat_time,
        rollouts.c.config,
    )
    .where(*_alive, _own, *_one)
    .with_for_update(skip_locked=True)
)
KEEP = Statement(
    update(rollouts)
    .where(rollouts.c.place == bindparam("at_place"))
    .values(last_heartbeat_time=_now, lease_expires=bindparam("new_lease"))
)
EXTEND_ALL = _extend(_own)
EXTEND = _extend(_own, *_many)
ADOPT = _extend(rollouts.c.worker_id.is_(None), *_many, worker_id=_worker)
"""Takes on attempts that were claimed without a worker."""
HELD_OF = Statement(select(rollouts.c.rollout_id, rollouts.c.attempt_id).where(*_alive, _own, *_many))

INSERT_JOURNAL = Statement(insert_into(journal, "position"))
READY = Statement(
    select(rollouts.c.place, rollouts.c.rollout_id, rollouts.c.attempt_id).where(
        any_of(rollouts.c.rollout_id, "ids"),
        rollouts.c.status == constant(AttemptStatus.RUNNING.value),
        rollouts.c.lease_expires > _now,
        rollouts.c.last_heartbeat_time
        > bindparam("at", type_=Double) - rollouts.c.unresponsive_seconds * literal_column(f"{SAME_MOMENT}"),
    )
)
"""Those whose attempt was heard of a moment ago, and is running."""

TAKEN = Statement(
    select(rollouts.c.rollout_id, attempts.c.attempt_id, attempts.c.place, attempts.c.sequence_id)
    .join_from(attempts, rollouts, rollouts.c.place == attempts.c.place)
    .where(attempts.c.worker_id == bindparam("worker_id"), UNTOLD)
    .order_by(attempts.c.end_time, attempts.c.place)
    .with_for_update(of=attempts, skip_locked=True)
)
TOLD = Statement(
    update(attempts)
    .where(attempts.c.place == bindparam("at_place"), attempts.c.sequence_id == bindparam("at_sequence"))
    .values(taken=0)
)

PLACES = Statement(
    select(rollouts.c.place, rollouts.c.rollout_id, rollouts.c.status)
    .where(any_of(rollouts.c.rollout_id, "ids"))
    .order_by(rollouts.c.place)
    .with_for_update()
)
RELEASE_TRAJECTORIES = Statement(
    delete(trajectories)
    .where(
        trajectories.c.place.in_(
            select(rollouts.c.place).where(
                any_of(rollouts.c.rollout_id, "ids"),
                rollouts.c.status == constant(RolloutStatus.SUCCEEDED.value),
            )
        )
    )
    .returning(trajectories.c.place)
)
OLDEST = Statement(
    select(completions.c.place, completions.c.rollout_id, completions.c.end_time)
    .order_by(completions.c.cursor)
    .limit(bindparam("count"))
)
OLDEST_START = Statement(select(rollouts.c.start_time).order_by(rollouts.c.place).limit(1))
FIRST_EVENTS = Statement(
    select(events.c.sequence, events.c.time).order_by(events.c.sequence).limit(EVENTS_AT_ONCE)
)
FORGET_EVENTS = Statement(delete(events).where(events.c.sequence <= bindparam("last")))
DELETE_COMPLETIONS = Statement(delete(completions).where(any_of(completions.c.rollout_id, "ids")))
DELETE_BY_PLACE = [
    Statement(delete(table).where(table.c.place == bindparam("at_place")))
    for table in (journal, trajectories, attempts, rollouts)
]
