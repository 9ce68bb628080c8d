"""The operations of a worker: reports on attempts, heartbeats, the turn journal; and housekeeping.

As in `queueing`, a call that is refused has written nothing but that fact.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from sqlalchemy import bindparam, delete, func, select, update

from rollwright.store.checks import LATEST, merged, pack_mapping
from rollwright.store.contract import AttemptRefused, ImpossibleChange, NotFound
from rollwright.store.records import Attempt, AttemptedRollout, AttemptStatus, EventKind
from rollwright.store.sql import schema
from rollwright.store.sql.changes import CLEAR_JOURNAL, end, heard, noted, split
from rollwright.store.sql.queueing import CLOCK, ROLLOUTS
from rollwright.store.sql.rows import ATTEMPT_COLUMNS, RULE_COLUMNS, AttemptRow, RuleRow
from rollwright.store.sql.schema import attempts, completions, journal, rollouts, trajectories
from rollwright.store.sql.statements import NOW, Operation, Statement, any_of, insert_into
from rollwright.store.sql.transaction import Transaction
from rollwright.store.transitions import FINAL_ATTEMPT, FINAL_ROLLOUT, check_attempt_change, lapsed


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
    rollout, attempt, now = yield from _find(rollout_id, attempt_id)
    if status is not None and status in FINAL_ATTEMPT and attempt.status == status:
        return attempt.record(rollout_id)
    _require_held(tx, rollout, attempt, now, worker_id, status)
    if status is not None and status != attempt.status:
        check_attempt_change(attempt.attempt_id, AttemptStatus(attempt.status), status)
    packed = merged(attempt.metadata, metadata, "metadata")
    if status is not None and status in FINAL_ATTEMPT:
        last = noted(rollout, attempt, now, worker_id=worker_id, metadata=packed)
        tx.heard(last.worker_id, now)
        after = yield from end(tx, rollout, last, status, reason, now, trajectory=trajectory)
    else:
        after = yield from heard(
            tx, rollout, attempt, now, worker_id=worker_id, status=status, metadata=packed
        )
    return after.record(rollout_id)


def give_back(tx: Transaction, claimed: Sequence[AttemptedRollout], reason: str) -> Operation[None]:
    """Puts rollouts back into the queue whose claim nobody will ever read."""
    for each in claimed:
        rollout, attempt, now = yield from _find(each.rollout_id, each.attempt.attempt_id)
        if attempt.end_time is None:
            yield from end(tx, rollout, attempt, AttemptStatus.CANCELLED, reason, now)


def heartbeat(
    tx: Transaction,
    worker_id: str,
    stats: Mapping[str, Any] | None,
    pairs: Sequence[tuple[str, str]] | None,
) -> Operation[list[tuple[str, str]]]:
    packed = {} if stats is None else {"heartbeat_stats": pack_mapping(stats, "heartbeat_stats")}
    if pairs is None:
        rows = yield HELD_BY_WORKER(worker_id=worker_id)
    else:
        rows = yield HELD_OF(ids=[rollout_id for rollout_id, _ in pairs])
    named = None if pairs is None else set(pairs)
    kept = set()
    for rollout, attempt, now in map(split, rows):
        pair = (rollout.rollout_id, attempt.attempt_id)
        theirs = attempt.worker_id not in (worker_id, None) or lapsed(attempt.lease_expires, now)
        if not theirs and (named is None or pair in named):
            yield from heard(tx, rollout, attempt, now, worker_id=worker_id)
            kept.add(pair)
    [[now]] = yield CLOCK()
    tx.heard(worker_id, now, **packed)
    return [pair for pair in pairs or () if pair not in kept]


def append_journal(
    tx: Transaction, rollout_id: str, attempt_id: str, entries: Sequence[bytes], append_id: str
) -> Operation[None]:
    rollout, attempt, now = yield from _find(rollout_id, attempt_id)
    _require_held(tx, rollout, attempt, now)
    if append_id == attempt.last_append_id:
        return
    yield from heard(tx, rollout, attempt, now, status=AttemptStatus.RUNNING, append_id=append_id)
    [[last]] = yield JOURNAL_LENGTH(at_place=rollout.place)
    yield INSERT_JOURNAL.many(
        [
            {"place": rollout.place, "position": position, "data": bytes(entry)}
            for position, entry in enumerate(entries, (last or 0) + 1)
        ]
    )


def clear_journal(tx: Transaction, rollout_id: str, attempt_id: str) -> Operation[None]:
    rollout, attempt, now = yield from _find(rollout_id, attempt_id)
    _require_held(tx, rollout, attempt, now)
    yield CLEAR_JOURNAL(at_place=rollout.place)
    yield from heard(tx, rollout, attempt, now)


def tell_taken(tx: Transaction, worker_id: str) -> Operation[list[tuple[str, str]]]:
    """What was taken from the worker since it was last told."""
    rows = yield TAKEN(worker_id=worker_id)
    if rows:
        yield TOLD.many([{"at_place": row[2], "at_sequence": row[3]} for row in rows])
    return [(row[0], row[1]) for row in rows]


def delete_rollouts(tx: Transaction, rollout_ids: Sequence[str]) -> Operation[int]:
    yield from tx.flush()  # a completion that is not yet written could not be deleted
    rows = yield PLACES(ids=list(dict.fromkeys(rollout_ids)))
    for _, rollout_id, status, _ in rows:
        if status not in FINAL_ROLLOUT:
            raise ImpossibleChange(f"rollout {rollout_id} is {status}; only a final one can be deleted")
    return (yield from _delete(tx, [(row[0], row[1], row[3]) for row in rows]))


def delete_finished(tx: Transaction, older_than: float, limit: int) -> Operation[int]:
    yield from tx.flush()
    rows = yield OLDEST(count=limit)
    old = []
    for place, rollout_id, end_time, now in rows:
        if end_time >= now - older_than:
            break
        old.append((place, rollout_id, now))
    return (yield from _delete(tx, old))


def _delete(tx: Transaction, rows: Sequence[tuple[int, str, float]]) -> Operation[int]:
    places = [{"at_place": place} for place, _, _ in rows]
    if places:
        for statement in DELETE_ALL:
            yield statement.many(places)
    for _, rollout_id, now in rows:
        tx.event(now, EventKind.DELETED, rollout_id)
    return len(rows)


def _find(rollout_id: str, attempt_id: str) -> Operation[tuple[RuleRow, AttemptRow, float]]:
    """Locks the rollout and the attempt."""
    if attempt_id == LATEST:
        rows = yield FIND_LATEST(rollout_id=rollout_id)
    else:
        rows = yield FIND(rollout_id=rollout_id, attempt_id=attempt_id)
    if rows:
        return split(rows[0])
    if (yield ROLLOUTS(ids=[rollout_id])):
        raise NotFound(f"rollout {rollout_id} has no attempt {attempt_id!r}")
    raise NotFound(f"no rollout {rollout_id!r}")


def _require_held(
    tx: Transaction,
    rollout: RuleRow,
    attempt: AttemptRow,
    now: float,
    worker_id: str | None = None,
    status: AttemptStatus | None = None,
) -> None:
    def refuse(why: str) -> NoReturn:
        tx.event(
            now,
            EventKind.REFUSED,
            rollout.rollout_id,
            attempt.attempt_id,
            attempt.worker_id,
            status,
            attempt.lease_expires,
        )
        raise AttemptRefused(f"attempt {attempt.attempt_id} of rollout {rollout.rollout_id}: {why}")

    if attempt.end_time is not None:
        refuse(f"it is {attempt.status}: {attempt.reason}" if attempt.reason else f"it is {attempt.status}")
    if lapsed(attempt.lease_expires, now):
        refuse("its lease has just run out")
    if worker_id is not None and attempt.worker_id not in (worker_id, None):
        refuse(f"worker {attempt.worker_id} holds it, not {worker_id}")


_BOTH = (
    select(*RULE_COLUMNS, *ATTEMPT_COLUMNS, NOW)
    .join_from(rollouts, attempts, attempts.c.place == rollouts.c.place)
    .with_for_update(of=[rollouts, attempts])
)
_BY_ID = _BOTH.where(rollouts.c.rollout_id == bindparam("rollout_id"))
FIND = Statement(_BY_ID.where(attempts.c.attempt_id == bindparam("attempt_id")))
FIND_LATEST = Statement(_BY_ID.where(attempts.c.sequence_id == rollouts.c.attempts))
_HELD = _BOTH.where(attempts.c.end_time.is_(None)).order_by(rollouts.c.place)
HELD_OF = Statement(_HELD.where(any_of(rollouts.c.rollout_id, "ids")))
HELD_BY_WORKER = Statement(_HELD.where(attempts.c.worker_id == bindparam("worker_id")))

JOURNAL_LENGTH = Statement(
    select(func.max(journal.c.position)).where(journal.c.place == bindparam("at_place"))
)
INSERT_JOURNAL = Statement(insert_into(journal))

TAKEN = Statement(
    select(rollouts.c.rollout_id, attempts.c.attempt_id, attempts.c.place, attempts.c.sequence_id)
    .join_from(attempts, rollouts, rollouts.c.place == attempts.c.place)
    .where(attempts.c.worker_id == bindparam("worker_id"), schema.UNTOLD)
    .order_by(attempts.c.end_time, attempts.c.place)
    .with_for_update(of=attempts, skip_locked=True)
)
TOLD = Statement(
    update(attempts)
    .where(attempts.c.place == bindparam("at_place"), attempts.c.sequence_id == bindparam("at_sequence"))
    .values(taken=0)
)

PLACES = Statement(
    select(rollouts.c.place, rollouts.c.rollout_id, rollouts.c.status, NOW)
    .where(any_of(rollouts.c.rollout_id, "ids"))
    .order_by(rollouts.c.place)
    .with_for_update()
)
OLDEST = Statement(
    select(completions.c.place, completions.c.rollout_id, completions.c.end_time, NOW)
    .order_by(completions.c.cursor)
    .limit(bindparam("count"))
)
DELETE_ALL = [
    Statement(delete(table).where(table.c.place == bindparam("at_place")))
    for table in (journal, trajectories, completions, attempts, rollouts)
]
