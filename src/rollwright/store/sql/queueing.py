"""The operations on the queue: rollouts come in, are given out, are changed or withdrawn by callers.

All that can be refused is checked before the first write, so operations that share a transaction need no
savepoints: a refused one leaves nothing for the others to commit.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import bindparam, select, update

from rollwright.store.checks import EMPTY, NewRollout, RolloutChange, config_to_bytes, merged, new_id, unpack
from rollwright.store.contract import ImpossibleChange, NotFound
from rollwright.store.records import AttemptedRollout, AttemptStatus, EventKind, Rollout, RolloutStatus
from rollwright.store.sql import schema
from rollwright.store.sql.changes import withdraw
from rollwright.store.sql.rows import ATTEMPT_COLUMNS, ROLLOUT_COLUMNS, AttemptRow, RolloutRow, RuleRow
from rollwright.store.sql.schema import attempts, resources, rollouts
from rollwright.store.sql.statements import NOW, Operation, Row, Statement, any_of, insert_into
from rollwright.store.sql.transaction import Transaction
from rollwright.store.transitions import FINAL_ROLLOUT, WAITING, check_caller_change, lease_end, unchanged


def enqueue(tx: Transaction, new: Sequence[NewRollout]) -> Operation[list[Rollout]]:
    yield from _require_resources(each.resources_id for each in new)
    inserted = yield INSERT_ROLLOUT.many([_values(each) for each in new])
    times: dict[str, float] = dict(inserted)  # type: ignore[arg-type]
    for each in new:
        if each.rollout_id in times:
            tx.event(times[each.rollout_id], EventKind.ENQUEUED, each.rollout_id)
    tx.changes.waiting |= bool(times)
    records = {
        each.rollout_id: _record(each, times[each.rollout_id]) for each in new if each.rollout_id in times
    }
    there = [each.rollout_id for each in new if each.rollout_id not in times]
    if there:
        rows = yield ROLLOUTS(ids=there)
        records.update((row[1], RolloutRow(*row).record()) for row in rows)
    return [records[each.rollout_id] for each in new]


def _values(new: NewRollout) -> dict[str, Any]:
    return {
        "rollout_id": new.rollout_id,
        "status": RolloutStatus.QUEUING,
        "waiting": 1,
        "end_time": None,
        "mode": new.mode,
        "resources_id": new.resources_id,
        "config": config_to_bytes(new.config),
        "metadata": new.metadata,
        "priority": new.priority,
        "tries": 0,
        "attempts": 0,
        "input": new.input,
    }


def _record(new: NewRollout, start_time: float) -> Rollout:
    return Rollout(
        rollout_id=new.rollout_id,
        input=unpack(new.input),
        status=RolloutStatus.QUEUING,
        start_time=start_time,
        mode=new.mode,
        resources_id=new.resources_id,
        config=new.config,
        metadata=unpack(new.metadata),
        priority=new.priority,
    )


def claim(
    tx: Transaction, limit: int, worker_id: str | None, claim_id: str, *, asked_before: bool = True
) -> Operation[list[AttemptedRollout]]:
    """`asked_before`: whether this claim id may have been used already."""
    if asked_before or tx.repeated:
        held = yield CLAIMED(claim_id=claim_id)
        if held:
            return [_attempted(row) for row in held]
    rows = yield TAKE(count=limit)
    given = yield from _give(tx, rows, worker_id, claim_id)
    if not rows:
        [[now]] = yield CLOCK()
        tx.heard(worker_id, now, last_dequeue_time=now)
    return given


def claim_for_each(
    tx: Transaction, claimants: Sequence[tuple[int, str | None, str]]
) -> Operation[list[list[AttemptedRollout]]]:
    """Serves waiting claimants in their order, until the queue is empty."""
    served = []
    for limit, worker_id, claim_id in claimants:
        given = yield from claim(tx, limit, worker_id, claim_id)
        if not given:
            break
        served.append(given)
    return served


def start(
    tx: Transaction, rollout_id: str, worker_id: str | None, claim_id: str
) -> Operation[AttemptedRollout]:
    held = yield CLAIMED(claim_id=claim_id)
    for row in held:
        if row[1] == rollout_id:
            return _attempted(row)
    rows = yield LOCK(ids=[rollout_id])
    if not rows:
        raise NotFound(f"no rollout {rollout_id!r}")
    status = RolloutStatus(rows[0][2])
    if status not in WAITING:
        raise ImpossibleChange(f"rollout {rollout_id} is {status}; only a waiting one can be claimed")
    [given] = yield from _give(tx, rows, worker_id, claim_id)
    return given


def start_new(
    tx: Transaction, new: NewRollout, worker_id: str | None, claim_id: str
) -> Operation[AttemptedRollout]:
    yield from enqueue(tx, [new])
    given = yield from start(tx, new.rollout_id, worker_id, claim_id)
    return given


def _give(
    tx: Transaction, rows: Sequence[Row], worker_id: str | None, claim_id: str
) -> Operation[list[AttemptedRollout]]:
    """Makes an attempt at each of the rollouts, which are waiting and locked."""
    given: list[AttemptedRollout] = []
    inserts: list[dict[str, Any]] = []
    for row in rows:
        now = row[-1]
        rollout = RolloutRow(*row[:-1])._replace(status=RolloutStatus.PREPARING)
        lease = lease_end(rollout.config, now, now)
        attempt = AttemptRow(
            rollout.place,
            rollout.attempts + 1,
            new_id("at"),
            AttemptStatus.PREPARING,
            now,
            None,
            worker_id,
            now,
            lease,
            None,
            EMPTY,
            None,
        )
        given.append(rollout.attempted(attempt.record(rollout.rollout_id)))
        inserts.append({**attempt._asdict(), "claim_id": claim_id, "taken": 0})
        tx.leased(lease)
        tx.heard(worker_id, now, last_dequeue_time=now, last_busy_time=now)
        tx.event(
            now,
            EventKind.CLAIMED,
            rollout.rollout_id,
            attempt.attempt_id,
            worker_id,
            lease_expires=lease,
        )
    if inserts:
        yield GIVE.many([{"at_place": each["place"]} for each in inserts])
        yield INSERT_ATTEMPT.many(inserts)
    return given


def _attempted(row: Row) -> AttemptedRollout:
    """Of a row of `ROLLOUT_COLUMNS` and `ATTEMPT_COLUMNS`."""
    middle = len(ROLLOUT_COLUMNS)
    rollout, attempt = RolloutRow(*row[:middle]), AttemptRow(*row[middle:])
    return rollout.attempted(attempt.record(rollout.rollout_id))


def update_rollout(
    tx: Transaction,
    rollout_id: str,
    change: RolloutChange,
    metadata: Mapping[str, Any] | None,
    reason: str | None,
) -> Operation[Rollout]:
    rows = yield LOCK(ids=[rollout_id])
    if not rows:
        raise NotFound(f"no rollout {rollout_id!r}")
    now, before = rows[0][-1], RolloutRow(*rows[0][:-1])
    status = change.status
    if status is not None and not unchanged(RolloutStatus(before.status), status):
        check_caller_change(rollout_id, RolloutStatus(before.status), status)
    else:
        status = None
    packed = merged(before.metadata, metadata, "metadata")
    yield from _require_resources([change.resources_id])
    yield CHANGE(
        at_place=before.place,
        new_mode=before.mode if change.mode is None else change.mode,
        new_resources=before.resources_id if change.resources_id is None else change.resources_id,
        new_config=before.config_data if change.config is None else config_to_bytes(change.config),
        new_metadata=packed,
        new_priority=before.priority if change.priority is None else change.priority,
    )
    if status is not None:
        yield from withdraw(tx, _rule(before), status, reason or f"set to {status} by a caller", now)
    [row] = yield ROLLOUTS(ids=[rollout_id])
    return RolloutRow(*row).record()


def cancel(tx: Transaction, rollout_ids: Iterable[str], reason: str) -> Operation[list[str]]:
    wanted = list(dict.fromkeys(rollout_ids))
    found = {row[1]: row for row in (yield LOCK(ids=wanted))}
    for rollout_id in wanted:
        if rollout_id not in found:
            raise NotFound(f"no rollout {rollout_id!r}")
    cancelled = []
    for rollout_id in wanted:
        row = found[rollout_id]
        if row[2] not in FINAL_ROLLOUT:
            yield from withdraw(tx, _rule(RolloutRow(*row[:-1])), RolloutStatus.CANCELLED, reason, row[-1])
            cancelled.append(rollout_id)
    return cancelled


def _rule(row: RolloutRow) -> RuleRow:
    return RuleRow(row.place, row.rollout_id, row.status, row.config_data, row.tries, row.attempts)


def _require_resources(names: Iterable[str | None]) -> Operation[None]:
    wanted = {name for name in names if name is not None}
    if wanted:
        found = {row[0] for row in (yield KNOWN_RESOURCES(ids=sorted(wanted)))}
        for name in sorted(wanted - found):
            raise NotFound(f"no resources {name!r}")


CLOCK = Statement(select(NOW))
INSERT_ROLLOUT = Statement(
    insert_into(rollouts, "place", "start_time")
    .values(start_time=NOW)
    .on_conflict_do_nothing(index_elements=["rollout_id"])
    .returning(rollouts.c.rollout_id, rollouts.c.start_time)
)
INSERT_ATTEMPT = Statement(insert_into(attempts))
ROLLOUTS = Statement(select(*ROLLOUT_COLUMNS).where(any_of(rollouts.c.rollout_id, "ids")))
LOCK = Statement(
    select(*ROLLOUT_COLUMNS, NOW)
    .where(any_of(rollouts.c.rollout_id, "ids"))
    .order_by(rollouts.c.place)
    .with_for_update()
)
TAKE = Statement(
    select(*ROLLOUT_COLUMNS, NOW)
    .where(schema.WAITING)
    .order_by(rollouts.c.priority.desc(), rollouts.c.place)
    .limit(bindparam("count"))
    .with_for_update(skip_locked=True)
)
CLAIMED = Statement(
    select(*ROLLOUT_COLUMNS, *ATTEMPT_COLUMNS)
    .join_from(attempts, rollouts, rollouts.c.place == attempts.c.place)
    .where(attempts.c.claim_id == bindparam("claim_id"), attempts.c.end_time.is_(None))
    .order_by(attempts.c.place)
)
GIVE = Statement(
    update(rollouts)
    .where(rollouts.c.place == bindparam("at_place"))
    .values(
        status=RolloutStatus.PREPARING.value,
        waiting=0,
        tries=rollouts.c.tries + 1,
        attempts=rollouts.c.attempts + 1,
    )
)
CHANGE = Statement(
    update(rollouts)
    .where(rollouts.c.place == bindparam("at_place"))
    .values(
        mode=bindparam("new_mode"),
        resources_id=bindparam("new_resources"),
        config=bindparam("new_config"),
        metadata=bindparam("new_metadata"),
        priority=bindparam("new_priority"),
    )
)
KNOWN_RESOURCES = Statement(
    select(resources.c.resources_id).where(any_of(resources.c.resources_id, "ids")).distinct()
)
