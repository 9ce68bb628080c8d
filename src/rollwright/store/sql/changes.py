"""The changes that operations are made of: an attempt is heard of, an attempt ends, a rollout is finished.

Each asks the rules of `transitions` first, and tells the transaction what others may be waiting for. Whoever
changes a rollout or an attempt has locked its rows before it read them: on PostgreSQL with `FOR UPDATE` of both
tables, because a row that is only joined would be as old as the statement's snapshot.
"""

from typing import Any

from sqlalchemy import bindparam, delete, select, update

from rollwright.store.records import AttemptStatus, EventKind, RolloutStatus
from rollwright.store.sql.rows import ATTEMPT_COLUMNS, RULE_COLUMNS, AttemptRow, RuleRow
from rollwright.store.sql.schema import HELD, attempts, journal, rollouts, trajectories
from rollwright.store.sql.statements import NOW, Operation, Row, Statement, insert_into
from rollwright.store.sql.transaction import Transaction
from rollwright.store.transitions import check_rollout_change, lapsed_as, lease_end, rollout_after

EXPIRY_BATCH = 500
"""Leases ended in one transaction, so that ending very many holds up nobody else for long."""


def heard(
    tx: Transaction, rollout: RuleRow, attempt: AttemptRow, now: float, **reported: Any
) -> Operation[AttemptRow]:
    """Extends the lease of an attempt that holds its rollout, and writes down what else it reports."""
    after = noted(rollout, attempt, now, **reported)
    if after.status != attempt.status:
        check_rollout_change(rollout.rollout_id, RolloutStatus(rollout.status), RolloutStatus.RUNNING)
        yield SET_STATUS(at_place=rollout.place, new_status=RolloutStatus.RUNNING)
    yield HEARD(
        at_place=after.place,
        at_sequence=after.sequence_id,
        new_status=after.status,
        new_worker=after.worker_id,
        new_heartbeat=now,
        new_lease=after.lease_expires,
        new_metadata=after.metadata,
        new_append=after.last_append_id,
    )
    tx.leased(after.lease_expires)
    if attempt.worker_id is None:
        tx.heard(after.worker_id, now, last_busy_time=now)
    else:
        tx.heard(after.worker_id, now)
    return after


def noted(
    rollout: RuleRow,
    attempt: AttemptRow,
    now: float,
    *,
    worker_id: str | None = None,
    status: AttemptStatus | None = None,
    metadata: bytes | None = None,
    append_id: str | None = None,
) -> AttemptRow:
    """The attempt after a sign of life; `None` leaves a field as it is."""
    return attempt._replace(
        status=attempt.status if status is None else status,
        worker_id=worker_id if attempt.worker_id is None else attempt.worker_id,
        last_heartbeat_time=now,
        lease_expires=lease_end(rollout.config, attempt.start_time, now),
        metadata=attempt.metadata if metadata is None else metadata,
        last_append_id=attempt.last_append_id if append_id is None else append_id,
    )


def end(
    tx: Transaction,
    rollout: RuleRow,
    attempt: AttemptRow,
    status: AttemptStatus,
    reason: str | None,
    now: float,
    *,
    becomes: RolloutStatus | None = None,
    taken: bool = False,
    trajectory: bytes | None = None,
) -> Operation[AttemptRow]:
    """Ends the attempt that holds the rollout, and gives the rollout the status that follows.

    `becomes`: decided by a caller instead of the retry rules. `taken`: its worker does not know yet.
    """
    tries = rollout.tries - (status is AttemptStatus.CANCELLED)
    after = becomes or rollout_after(status, rollout.config, tries)
    check_rollout_change(rollout.rollout_id, RolloutStatus(rollout.status), after)
    yield END(
        at_place=attempt.place,
        at_sequence=attempt.sequence_id,
        new_status=status,
        new_end=now,
        new_reason=reason,
        new_taken=int(taken and attempt.worker_id is not None),
        new_worker=attempt.worker_id,
        new_heartbeat=attempt.last_heartbeat_time,
        new_lease=attempt.lease_expires,
        new_metadata=attempt.metadata,
    )
    tx.released(attempt.worker_id, now)
    tx.changes.taken |= taken
    tx.event(
        now,
        EventKind.ENDED,
        rollout.rollout_id,
        attempt.attempt_id,
        attempt.worker_id,
        status,
        attempt.lease_expires,
    )
    if after is RolloutStatus.REQUEUING:
        yield REQUEUE(at_place=rollout.place, new_tries=tries)
        tx.changes.waiting = True
    else:
        yield from finish(tx, rollout, attempt.attempt_id, after, reason, now)
        if trajectory is not None:
            yield INSERT_TRAJECTORY(place=rollout.place, data=trajectory)
    return attempt._replace(status=status, end_time=now, reason=reason)


def finish(
    tx: Transaction,
    rollout: RuleRow,
    attempt_id: str | None,
    status: RolloutStatus,
    reason: str | None,
    now: float,
) -> Operation[None]:
    check_rollout_change(rollout.rollout_id, RolloutStatus(rollout.status), status)
    yield FINISH(at_place=rollout.place, new_status=status, new_end=now)
    if rollout.attempts:
        yield CLEAR_JOURNAL(at_place=rollout.place)
    tx.event(now, EventKind.FINISHED, rollout.rollout_id, attempt_id, status=status)
    tx.complete(
        {
            "place": rollout.place,
            "rollout_id": rollout.rollout_id,
            "attempt_id": attempt_id,
            "status": status,
            "reason": reason,
            "end_time": now,
        }
    )


def withdraw(
    tx: Transaction, rollout: RuleRow, status: RolloutStatus, reason: str, now: float
) -> Operation[None]:
    """Takes the rollout from its worker, if it has one, and gives it another status."""
    found = yield CURRENT(at_place=rollout.place)
    if found:
        attempt = AttemptRow(*found[0])
        yield from end(tx, rollout, attempt, AttemptStatus.CANCELLED, reason, now, becomes=status, taken=True)
    else:
        yield from finish(tx, rollout, None, status, reason, now)


def expire(tx: Transaction) -> Operation[bool]:
    """Ends the attempts whose lease is over; returns whether there may be more."""
    rows = yield LAPSED()
    for row in rows:
        rollout, attempt, now = split(row)
        assert attempt.lease_expires is not None
        status, reason = lapsed_as(rollout.config, attempt.start_time, attempt.lease_expires)
        yield from end(tx, rollout, attempt, status, reason, now, taken=True)
    return len(rows) == EXPIRY_BATCH


def split(row: Row) -> tuple[RuleRow, AttemptRow, float]:
    """A row of `RULE_COLUMNS`, `ATTEMPT_COLUMNS` and the time."""
    middle = len(RULE_COLUMNS)
    return RuleRow(*row[:middle]), AttemptRow(*row[middle:-1]), row[-1]


_ONE_ATTEMPT: list[Any] = [
    attempts.c.place == bindparam("at_place"),
    attempts.c.sequence_id == bindparam("at_sequence"),
]

HEARD = Statement(
    update(attempts)
    .where(*_ONE_ATTEMPT)
    .values(
        status=bindparam("new_status"),
        worker_id=bindparam("new_worker"),
        last_heartbeat_time=bindparam("new_heartbeat"),
        lease_expires=bindparam("new_lease"),
        metadata=bindparam("new_metadata"),
        last_append_id=bindparam("new_append"),
    )
)
END = Statement(
    update(attempts)
    .where(*_ONE_ATTEMPT)
    .values(
        status=bindparam("new_status"),
        end_time=bindparam("new_end"),
        reason=bindparam("new_reason"),
        taken=bindparam("new_taken"),
        worker_id=bindparam("new_worker"),
        last_heartbeat_time=bindparam("new_heartbeat"),
        lease_expires=bindparam("new_lease"),
        metadata=bindparam("new_metadata"),
    )
)
SET_STATUS = Statement(
    update(rollouts).where(rollouts.c.place == bindparam("at_place")).values(status=bindparam("new_status"))
)
REQUEUE = Statement(
    update(rollouts)
    .where(rollouts.c.place == bindparam("at_place"))
    .values(status=RolloutStatus.REQUEUING.value, waiting=1, tries=bindparam("new_tries"))
)
FINISH = Statement(
    update(rollouts)
    .where(rollouts.c.place == bindparam("at_place"))
    .values(status=bindparam("new_status"), waiting=0, end_time=bindparam("new_end"))
)
CURRENT = Statement(select(*ATTEMPT_COLUMNS).where(attempts.c.place == bindparam("at_place"), HELD))
LAPSED = Statement(
    select(*RULE_COLUMNS, *ATTEMPT_COLUMNS, NOW)
    .join_from(attempts, rollouts, rollouts.c.place == attempts.c.place)
    .where(attempts.c.end_time.is_(None), attempts.c.lease_expires <= NOW)
    .order_by(attempts.c.lease_expires)
    .limit(EXPIRY_BATCH)
    .with_for_update(of=[rollouts, attempts], skip_locked=True)
)
INSERT_TRAJECTORY = Statement(insert_into(trajectories))
CLEAR_JOURNAL = Statement(delete(journal).where(journal.c.place == bindparam("at_place")))
