"""Changes that several operations share: a lease is renewed or expires, an attempt ends, a rollout is withdrawn.

Each applies the rules of `transitions` first, and records in the transaction what waiting calls depend on. The caller has
locked the rollout's row when it read it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace
from sqlalchemy import ColumnElement, bindparam, case, delete, null, select, update

from rollwright.store.checks import EMPTY, unpack
from rollwright.store.errors import StoreDamaged
from rollwright.store.records import Attempt, AttemptStatus, EventKind, RolloutStatus
from rollwright.store.sql.rows import RULE_COLUMNS, RolloutRow
from rollwright.store.sql.schema import ATTEMPTS_OF_ONE, HELD, attempts, journal, rollouts, trajectories
from rollwright.store.sql.statements import Operation, Statement, constant, insert_into
from rollwright.store.sql.transaction import Transaction
from rollwright.store.transitions import check_rollout_change, lapsed_as, lease_end, rollout_after

_CANCELLED, _RUNNING, _REQUEUING = (
    AttemptStatus.CANCELLED,
    AttemptStatus.RUNNING.value,
    RolloutStatus.REQUEUING,
)
"""Looked up once: access to an enum member costs as much as creating a small record."""
EXPIRY_BATCH = 500
"""Leases ended by one query, so that ending very many blocks no other call for long."""


def with_report(
    row: RolloutRow,
    now: float,
    *,
    worker_id: str | None = None,
    status: AttemptStatus | None = None,
    metadata: bytes | None = None,
    append_id: str | None = None,
) -> RolloutRow:
    """The rollout after a report of the attempt that holds it; `None` leaves a field as it is."""
    return replace(
        row,
        status=row.status if status is None else status._value_,
        worker_id=worker_id if row.worker_id is None else row.worker_id,
        last_heartbeat_time=now,
        attempt_metadata=row.attempt_metadata if metadata is None else metadata,
        last_append_id=row.last_append_id if append_id is None else append_id,
    )


def renew_lease(tx: Transaction, row: RolloutRow, **reported: Any) -> Operation[RolloutRow]:
    """Extends the lease of the attempt that holds the rollout, and writes the fields that it reports."""
    assert row.attempt_start is not None
    lease = lease_end(row.config, row.attempt_start, tx.now)
    after = replace(with_report(row, tx.now, **reported), lease_expires=lease)
    if after.status != row.status:
        check_rollout_change(row.rollout_id, row.rollout_status, after.rollout_status)
    yield RENEW(
        at_place=after.place,
        new_status=after.status,
        new_worker=after.worker_id,
        new_heartbeat=after.last_heartbeat_time,
        new_lease=lease,
        new_metadata=after.attempt_metadata,
        new_append=after.last_append_id,
    )
    tx.held.keep(after)
    tx.note_lease(lease)
    tx.stamps.record(after.worker_id, tx.now, busy=row.worker_id is None)
    return after


class Ending(NamedTuple):
    """An attempt that ends; `write_endings` writes the changes of its rollout."""

    attempt: Attempt
    release: tuple[Any, ...]
    """The values of `RELEASE`."""
    journal_of: int | None
    """The place of a rollout whose journal is to be deleted."""


def end(
    tx: Transaction, row: RolloutRow, status: AttemptStatus, reason: str | None, **how: Any
) -> Operation[Attempt]:
    """Ends the attempt that holds the rollout; `how` as for `prepare_ending`."""
    ended = prepare_ending(tx, row, status, reason, **how)
    yield from write_endings([ended])
    return ended.attempt


def write_endings(endings: Sequence[Ending]) -> Operation[None]:
    if endings:
        yield RELEASE.many([each.release for each in endings])
    journals = [{"at_place": each.journal_of} for each in endings if each.journal_of is not None]
    if journals:
        yield CLEAR_JOURNAL.many(journals)


def prepare_ending(
    tx: Transaction,
    row: RolloutRow,
    status: AttemptStatus,
    reason: str | None,
    *,
    becomes: RolloutStatus | None = None,
    taken: bool = False,
    trajectory: bytes | None = None,
    last: tuple[str | None, float | None, bytes] | None = None,
) -> Ending:
    """Ends the attempt that holds the rollout, and decides the rollout's next status.

    `becomes`: a status chosen by a caller instead of the retry rules. `taken`: the worker has to be notified. `last`: the
    worker, the last heartbeat and the metadata, if the attempt reports its end itself.
    """
    assert row.attempt_id is not None
    assert row.attempt_start is not None
    tries = row.tries - (status is _CANCELLED)
    after = becomes or rollout_after(status, row.config, tries)
    waits = after is _REQUEUING
    worker_id, heartbeat, metadata = last or (
        row.worker_id,
        row.last_heartbeat_time,
        row.attempt_metadata or EMPTY,
    )
    check_rollout_change(row.rollout_id, row.rollout_status, after)
    tx.held.forget(row.rollout_id)
    attempt = Attempt(
        row.rollout_id,
        row.attempt_id,
        row.attempts,
        status,
        row.attempt_start,
        tx.now,
        worker_id,
        heartbeat,
        row.lease_expires,
        reason,
        unpack(metadata),
    )
    _archive(tx, row.place, attempt, metadata, taken)
    tx.stamps.record_release(worker_id, tx.now)
    tx.changes.taken |= taken
    tx.changes.waiting |= waits
    tx.log_ended(row.rollout_id, row.attempt_id, worker_id, status, row.lease_expires, after)
    journal_of = None
    if not waits:
        if trajectory is not None:
            tx.insert_later(INSERT_TRAJECTORY, (row.place, trajectory))
        if row.attempts > 1 or row.status == _RUNNING:  # the first journalled turn makes it running
            journal_of = row.place
        tx.complete(row.place, row.rollout_id, row.attempt_id, after, reason)
    release = (after._value_, int(waits), None if waits else tx.now, tries, row.place)
    return Ending(attempt, release, journal_of)


def _archive(tx: Transaction, place: int, attempt: Attempt, metadata: bytes, taken: bool) -> None:
    """Inserts the attempt into the table of ended ones."""
    why = () if attempt.reason is None else (attempt.reason,)
    values = (
        place * ATTEMPTS_OF_ONE + attempt.sequence_id,
        place,
        attempt.sequence_id,
        attempt.attempt_id,
        attempt.status._value_,
        attempt.start_time,
        attempt.end_time,
        attempt.worker_id,
        attempt.last_heartbeat_time,
        attempt.lease_expires,
        *why,
        bytearray(metadata),
        int(taken and attempt.worker_id is not None),
    )
    tx.insert_later(INSERT_ATTEMPT if why else INSERT_WITHOUT_REASON, values)


def withdraw(tx: Transaction, row: RolloutRow, status: RolloutStatus, reason: str | None) -> Operation[None]:
    """Sets a status chosen by a caller, and ends the attempt that holds the rollout, if any."""
    if row.attempt_id is not None:
        yield from end(tx, row, AttemptStatus.CANCELLED, reason, becomes=status, taken=True)
        return
    check_rollout_change(row.rollout_id, row.rollout_status, status)
    yield RELEASE(
        at_place=row.place, new_status=status._value_, new_waiting=0, new_end=tx.now, new_tries=row.tries
    )
    yield CLEAR_JOURNAL(at_place=row.place)
    tx.log_event(EventKind.ENDED, row.rollout_id, becomes=status._value_)
    tx.complete(row.place, row.rollout_id, None, status, reason)


def expire(tx: Transaction) -> Operation[None]:
    """Ends the attempts whose lease has expired."""
    ended: set[int] = set()
    while rows := (yield LAPSED(now=tx.now)):
        for found in rows:
            row = RolloutRow(*found)
            if row.place in ended:
                raise StoreDamaged(f"rollout {row.rollout_id}: its lease has expired, and cannot be ended")
            ended.add(row.place)
            assert row.attempt_start is not None
            assert row.lease_expires is not None
            status, reason = lapsed_as(row.config, row.attempt_start, row.lease_expires)
            yield from end(tx, row, status, reason, taken=True)


def lease_from(start: ColumnElement[Any], now: ColumnElement[Any]) -> ColumnElement[Any]:
    """`transitions.lease_end` in SQL, for statements that change many rows at once."""
    silence = now + rollouts.c.unresponsive_seconds
    limit = start + rollouts.c.timeout_seconds
    return case(
        (silence.is_(None), limit), (limit.is_(None), silence), (silence < limit, silence), else_=limit
    )


_ONE: Any = rollouts.c.place == bindparam("at_place")

RENEW = Statement(
    update(rollouts)
    .where(_ONE)
    .values(
        status=bindparam("new_status"),
        worker_id=bindparam("new_worker"),
        last_heartbeat_time=bindparam("new_heartbeat"),
        lease_expires=bindparam("new_lease"),
        attempt_metadata=bindparam("new_metadata"),
        last_append_id=bindparam("new_append"),
    )
)
RELEASE = Statement(
    update(rollouts)
    .where(_ONE)
    .values(
        status=bindparam("new_status"),
        waiting=bindparam("new_waiting"),
        end_time=bindparam("new_end"),
        tries=bindparam("new_tries"),
        attempt_id=null(),
        worker_id=null(),
        claim_id=null(),
        attempt_start=null(),
        last_heartbeat_time=null(),
        lease_expires=null(),
        last_append_id=null(),
        attempt_metadata=null(),
    )
)
LAPSED = Statement(
    select(*RULE_COLUMNS)
    .where(HELD, rollouts.c.lease_expires <= bindparam("now"))
    .order_by(rollouts.c.lease_expires, rollouts.c.place)
    .limit(constant(EXPIRY_BATCH))
    .with_for_update(skip_locked=True)
)
INSERT_ATTEMPT = Statement(insert_into(attempts))
INSERT_WITHOUT_REASON = Statement(insert_into(attempts, "reason"))
INSERT_TRAJECTORY = Statement(insert_into(trajectories))
CLEAR_JOURNAL = Statement(delete(journal).where(journal.c.place == bindparam("at_place")))
