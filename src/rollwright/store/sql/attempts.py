"""Operations of workers: reports on attempts, heartbeats, the turn journal, notices of lost attempts.

As in `queue`, an operation checks everything that can be rejected before its first write; a rejected report writes
nothing but its event.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeGuard

import msgspec
from msgspec.structs import replace
from sqlalchemy import ColumnElement, Double, bindparam, literal_column, or_, select, update

from rollwright.store.checks import EMPTY, LATEST, merged
from rollwright.store.errors import AttemptRefused, NotFound, StoreError
from rollwright.store.records import Attempt, AttemptedRollout, AttemptStatus, EventKind
from rollwright.store.sql.changes import (
    CLEAR_JOURNAL,
    Ending,
    end,
    lease_from,
    prepare_ending,
    renew_lease,
    write_endings,
)
from rollwright.store.sql.rows import ATTEMPT_COLUMNS, RULE_COLUMNS, AttemptRow, RolloutRow, stored_config
from rollwright.store.sql.schema import (
    ATTEMPTS_OF_ONE,
    HELD,
    UNREPORTED,
    attempts,
    journal,
    rollouts,
)
from rollwright.store.sql.statements import Operation, Row, Statement, Values, any_of, constant, insert_into
from rollwright.store.sql.transaction import Transaction
from rollwright.store.transitions import (
    FINAL_ATTEMPT,
    SAME_MOMENT,
    check_attempt_change,
    is_news,
    lapsed,
    lease_end,
)

Pair = tuple[str, str]
"""A rollout id and an attempt id."""
Holding = tuple[str, Pair]
"""A worker id, and the attempt that it plays."""
Turn = tuple[str, str, bytes]
"""A rollout id, an attempt id, and an entry of the journal."""
Append = tuple[str, str, Sequence[bytes], str | None]
"""A rollout id, an attempt id, entries of the journal, and an idempotency key."""
Heartbeat = tuple[str, bytes | None, Sequence[Pair] | None]
"""A worker id, its packed statistics, and the attempts that it plays; `None`: all that it holds."""


class Report(msgspec.Struct, frozen=True, gc=False):
    """A worker's report on an attempt; `None` leaves a field as it is."""

    rollout_id: str
    attempt_id: str
    status: AttemptStatus | None = None
    worker_id: str | None = None
    trajectory: bytes | None = None
    reason: str | None = None
    metadata: Mapping[str, Any] | None = None


def report_many(tx: Transaction, given: Sequence[Report]) -> Operation[list[Attempt | StoreError]]:
    """Reports of several callers. Consecutive ends of attempts that hold cached rollouts share a statement."""
    outcomes: list[Attempt | StoreError] = []
    endings: list[Ending] = []
    for each in given:
        row = tx.held.get(each.rollout_id)
        try:
            if row is not None and each.attempt_id == row.attempt_id and each.status in FINAL_ATTEMPT:
                endings.append(_end_by_report(tx, row, each))
                outcomes.append(endings[-1].attempt)
                continue
            yield from write_endings(endings)
            endings = []
            outcomes.append((yield from report(tx, each)))
        except StoreError as refusal:
            outcomes.append(refusal)
    yield from write_endings(endings)
    return outcomes


def report(tx: Transaction, each: Report) -> Operation[Attempt]:
    row = yield from _find(tx, each.rollout_id)
    ended = yield from _find_ended(tx, row, each.attempt_id)
    if ended is not None:
        if each.status is not None and ended.status is each.status:
            return ended
        _refuse_ended(tx, ended, each.status)
    if each.status in FINAL_ATTEMPT:
        ending = _end_by_report(tx, row, each)
        yield from write_endings([ending])
        return ending.attempt
    packed = _accept_report(tx, row, each)
    after = yield from renew_lease(tx, row, worker_id=each.worker_id, status=each.status, metadata=packed)
    return after.attempt()


def _end_by_report(tx: Transaction, row: RolloutRow, each: Report) -> Ending:
    """Ends the attempt that holds the rollout, as it reports itself."""
    assert each.status is not None
    packed = _accept_report(tx, row, each)
    worker_id = each.worker_id if row.worker_id is None else row.worker_id
    tx.stamps.record(worker_id, tx.now)
    last = (worker_id, tx.now, packed)
    return prepare_ending(tx, row, each.status, each.reason, trajectory=each.trajectory, last=last)


def _accept_report(tx: Transaction, row: RolloutRow, each: Report) -> bytes:
    """Rejects a report that the holding attempt may not make; returns its metadata after the report."""
    _require_held(tx, row, each.worker_id, each.status)
    if each.status is not None and each.status != row.status:
        check_attempt_change(each.attempt_id, row.attempt_status, each.status)
    return merged(row.attempt_metadata or EMPTY, each.metadata, "metadata")


def give_back(tx: Transaction, claimed: Sequence[AttemptedRollout], reason: str) -> Operation[None]:
    """Requeues rollouts whose caller was cancelled before it received the claim."""
    for each in claimed:
        row = yield from _find(tx, each.rollout_id)
        if row.attempt_id == each.attempt.attempt_id:
            yield from end(tx, row, AttemptStatus.CANCELLED, reason)


def record_heartbeats(tx: Transaction, beats: Sequence[Heartbeat]) -> Operation[list[list[Pair]]]:
    """Heartbeats of several callers; returns for each the attempts that it does not hold any more."""
    known = [recall_heartbeat(tx, beat) for beat in beats]
    unknown = [beat for beat, answer in zip(beats, known, strict=True) if answer is None]
    kept = yield from _extend_leases(
        tx, [(worker, pairs[0]) for worker, _, pairs in unknown if _is_one(pairs)]
    )
    lost: list[list[Pair]] = []
    for (worker_id, stats, pairs), answer in zip(beats, known, strict=True):
        if answer is not None:
            lost.append(answer)
        elif _is_one(pairs) and (worker_id, pairs[0]) in kept:
            tx.stamps.record(worker_id, tx.now, stats=stats)
            lost.append([])
        else:
            lost.append((yield from heartbeat(tx, worker_id, stats, pairs)))
    return lost


def recall_heartbeat(tx: Transaction, beat: Heartbeat) -> list[Pair] | None:
    """Answers a heartbeat from the cached rows: the worker holds all attempts that it names, and renewed their leases a
    moment ago, so nothing is written. `None`: the heartbeat needs a transaction."""
    worker_id, stats, pairs = beat
    if pairs is None:
        return None
    for rollout_id, attempt_id in pairs:
        row = tx.held.get(rollout_id)
        if row is None or row.attempt_id != attempt_id or row.worker_id != worker_id:
            return None
        assert row.last_heartbeat_time is not None
        if lapsed(row.lease_expires, tx.now) or is_news(row.config, row.last_heartbeat_time, tx.now):
            return None
    tx.stamps.record(worker_id, tx.now, stats=stats)
    return []


def _is_one(pairs: Sequence[Pair] | None) -> TypeGuard[Sequence[Pair]]:
    return pairs is not None and len(pairs) == 1


def _extend_leases(tx: Transaction, asked: Sequence[Holding]) -> Operation[set[Holding]]:
    """Extends the lease of one attempt per worker; returns those that are alive and belong to the worker. A lease that was
    extended a moment ago stays as it is, which writes nothing."""
    if not asked:
        return set()
    values = [(tx.now, worker_id, rollout_id, attempt_id) for worker_id, (rollout_id, attempt_id) in asked]
    kept: set[Holding] = set()
    extended: list[Values] = []
    for worker_id, rollout_id, attempt_id, place, start, heard_at, packed in (yield ALIVE.many(values)):
        kept.add((worker_id, (rollout_id, attempt_id)))
        config = stored_config(packed)
        if is_news(config, heard_at, tx.now):
            lease = lease_end(config, start, tx.now)
            extended.append({"at_place": place, "now": tx.now, "new_lease": lease})
            tx.note_lease(lease)
            row = tx.held.get(rollout_id)
            if row is not None:
                tx.held.keep(replace(row, last_heartbeat_time=tx.now, lease_expires=lease))
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
    tx.stamps.record(worker_id, tx.now, busy=bool(adopted), stats=stats)
    for rollout_id, _, lease in rows:
        tx.held.forget(rollout_id)
        tx.note_lease(lease)
    return [pair for pair in missing if pair not in kept]


def _by_column(pairs: Sequence[Pair]) -> dict[str, list[str]]:
    return {
        "ids": [rollout_id for rollout_id, _ in pairs],
        "attempts": [attempt_id for _, attempt_id in pairs],
    }


def append_turns(tx: Transaction, turns: Sequence[Turn]) -> Operation[list[StoreError | None]]:
    """Appends one turn for each of several callers, without idempotency keys. Rows of rollouts whose lease was extended a
    moment ago, which are most, stay unchanged."""
    ready = _find_ready(tx, turns)
    unknown = [rollout_id for rollout_id, _, _ in turns if rollout_id not in tx.held]
    if unknown:
        ready |= {(row[1], row[2]): row[0] for row in (yield READY(ids=unknown, now=tx.now, at=tx.now))}
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


def _find_ready(tx: Transaction, turns: Sequence[Turn]) -> dict[Pair, int]:
    """The places of the cached rollouts that satisfy the conditions of `READY`."""
    found: dict[Pair, int] = {}
    for rollout_id, attempt_id, _ in turns:
        row = tx.held.get(rollout_id)
        if row is None or row.attempt_id != attempt_id or row.status != AttemptStatus.RUNNING:
            continue
        assert row.last_heartbeat_time is not None
        if not (lapsed(row.lease_expires, tx.now) or is_news(row.config, row.last_heartbeat_time, tx.now)):
            found[rollout_id, attempt_id] = row.place
    return found


def append_once(tx: Transaction, appends: Sequence[Append]) -> Operation[list[StoreError | None]]:
    """Appends entries for each of several callers, with idempotency keys."""
    refused: list[StoreError | None] = []
    for each in appends:
        try:
            yield from append_journal(tx, *each)
            refused.append(None)
        except StoreError as error:
            refused.append(error)
    return refused


def append_journal(
    tx: Transaction, rollout_id: str, attempt_id: str, entries: Sequence[bytes], append_id: str | None
) -> Operation[None]:
    """`append_id`: the idempotency key; `None`: the call is never repeated."""
    row = yield from _find_held(tx, rollout_id, attempt_id)
    if append_id is None or append_id != row.last_append_id:
        yield from renew_lease(tx, row, status=AttemptStatus.RUNNING, append_id=append_id)
        yield INSERT_JOURNAL.many([(row.place, bytes(entry)) for entry in entries])


def clear_journal(tx: Transaction, rollout_id: str, attempt_id: str) -> Operation[None]:
    row = yield from _find_held(tx, rollout_id, attempt_id)
    yield CLEAR_JOURNAL(at_place=row.place)
    yield from renew_lease(tx, row)


def take_lost_attempts(tx: Transaction, worker_id: str) -> Operation[list[tuple[str, str]]]:
    """The attempts that the worker has lost since the last call; marks them as reported."""
    yield from tx.write_inserts()
    rows = yield LOST_ATTEMPTS(worker_id=worker_id)
    if rows:
        yield MARK_REPORTED.many([{"told": row[2]} for row in rows])
    return [(row[0], row[1]) for row in rows]


def write_stamps(tx: Transaction) -> Operation[None]:
    """Writes the pending signs of life of workers."""
    tx.stamps_at_once = True
    yield from ()


def _find(tx: Transaction, rollout_id: str) -> Operation[RolloutRow]:
    """The rollout, from the cache or read with a row lock."""
    known = tx.held.get(rollout_id)
    if known is not None:
        return known
    rows = yield FIND.many([(rollout_id,)])
    if not rows:
        raise NotFound(f"no rollout {rollout_id!r}")
    return RolloutRow(*rows[0])


def _find_ended(tx: Transaction, row: RolloutRow, attempt_id: str) -> Operation[Attempt | None]:
    """The attempt if it has ended, or `None` if it holds the rollout."""
    if row.attempt_id is not None and attempt_id in (row.attempt_id, LATEST):
        return None
    yield from tx.write_inserts()
    found = [AttemptRow(*each) for each in (yield ENDED(at_place=row.place))]
    for each in reversed(found):
        if attempt_id in (each.attempt_id, LATEST):
            return each.record(row.rollout_id)
    raise NotFound(f"rollout {row.rollout_id} has no attempt {attempt_id!r}")


def _find_held(tx: Transaction, rollout_id: str, attempt_id: str) -> Operation[RolloutRow]:
    """The rollout if the attempt holds it; otherwise the call is rejected."""
    row = yield from _find(tx, rollout_id)
    ended = yield from _find_ended(tx, row, attempt_id)
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
        _refuse(tx, row.attempt(), status, "its lease has just expired")
    if worker_id is not None and row.worker_id not in (worker_id, None):
        _refuse(tx, row.attempt(), status, f"worker {row.worker_id} holds it, not {worker_id}")


def _refuse(tx: Transaction, attempt: Attempt, status: AttemptStatus | None, why: str) -> NoReturn:
    tx.log_event(
        EventKind.REFUSED,
        attempt.rollout_id,
        attempt.attempt_id,
        attempt.worker_id,
        None if status is None else status._value_,
        attempt.lease_expires,
    )
    raise AttemptRefused(f"attempt {attempt.attempt_id} of rollout {attempt.rollout_id}: {why}")


_place: ColumnElement[int] = bindparam("at_place", type_=attempts.c.number.type)
ATTEMPTS_OF_PLACE: list[Any] = [
    attempts.c.number >= _place * constant(ATTEMPTS_OF_ONE),
    attempts.c.number < (_place + constant(1)) * constant(ATTEMPTS_OF_ONE),
]
FIND = Statement(
    select(*RULE_COLUMNS).where(rollouts.c.rollout_id == bindparam("rollout_id")).with_for_update()
)
ENDED = Statement(select(*ATTEMPT_COLUMNS).where(*ATTEMPTS_OF_PLACE).order_by(attempts.c.number))

_now: ColumnElement[float] = bindparam("now", type_=Double)
_worker: ColumnElement[str] = bindparam("worker", type_=rollouts.c.worker_id.type)
_alive: list[Any] = [HELD, or_(rollouts.c.lease_expires.is_(None), rollouts.c.lease_expires > _now)]
_own: Any = rollouts.c.worker_id == _worker
_one = [rollouts.c.rollout_id == bindparam("rollout_id"), rollouts.c.attempt_id == bindparam("attempt_id")]
_many = [any_of(rollouts.c.rollout_id, "ids"), any_of(rollouts.c.attempt_id, "attempts")]


def _extend(*conditions: Any, **also: Any) -> Statement:
    """Extends the leases of attempts that are alive. Rows that another transaction has locked are skipped: an attempt of
    theirs reports at this moment, and waiting for them while holding other locks could deadlock."""
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
"""Assigns attempts that were claimed without a worker id to this worker."""
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
"""Rollouts whose attempt is running and had its lease extended a moment ago."""

LOST_ATTEMPTS = Statement(
    select(rollouts.c.rollout_id, attempts.c.attempt_id, attempts.c.number)
    .join_from(attempts, rollouts, rollouts.c.place == attempts.c.place)
    .where(attempts.c.worker_id == bindparam("worker_id"), UNREPORTED)
    .order_by(attempts.c.end_time, attempts.c.place)
    .with_for_update(of=attempts, skip_locked=True)
)
MARK_REPORTED = Statement(update(attempts).where(attempts.c.number == bindparam("told")).values(taken=0))
