"""Operations on the queue: rollouts are enqueued, changed and cancelled; `claims` has those that claim them.

An operation checks everything that can be rejected before its first write. So operations that share a transaction need
no savepoints: a rejected one leaves nothing behind that the others would commit.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import bindparam, null, select, update

from rollwright.store.calls import UpdateRollout
from rollwright.store.checks import NewRollout, config_to_bytes, merged, unpack
from rollwright.store.errors import NotFound
from rollwright.store.records import (
    Rollout,
    RolloutStatus,
)
from rollwright.store.sql.changes import withdraw
from rollwright.store.sql.resources import require_resources
from rollwright.store.sql.rows import ROLLOUT_COLUMNS, RolloutRow
from rollwright.store.sql.schema import rollouts
from rollwright.store.sql.statements import Call, Operation, Statement, any_of, constant, insert_into
from rollwright.store.sql.transaction import Transaction
from rollwright.store.transitions import FINAL_ROLLOUT, WAITING, check_caller_change, unchanged

_QUEUING = RolloutStatus.QUEUING
"""Looked up once: access to an enum member costs as much as creating a small record."""


def enqueue(tx: Transaction, new: Sequence[NewRollout]) -> Operation[list[Rollout]]:
    """Enqueues the rollouts of one caller; an id that exists returns that rollout."""
    yield from require_resources(each.resources_id for each in new)
    inserted = {row[0] for row in (yield INSERT_ROLLOUT.many([_values(each, tx.now) for each in new]))}
    records: dict[str, Rollout] = {}
    for each in new:
        if each.rollout_id in inserted and each.rollout_id not in records:
            records[each.rollout_id] = new_record(each, tx.now)
            tx.log_enqueued(each.rollout_id)
    tx.changes.waiting |= bool(inserted)
    there = [each.rollout_id for each in new if each.rollout_id not in inserted]
    if there:
        rows = yield ROLLOUTS(ids=there)
        records.update((row[1], RolloutRow(*row).record()) for row in rows)
    return [records[each.rollout_id] for each in new]


def enqueue_many(tx: Transaction, calls: Sequence[Sequence[NewRollout]]) -> Operation[list[list[Rollout]]]:
    """Enqueues the rollouts of several callers, with ids that were generated for these calls and without resources."""
    if tx.repeated:  # the first execution may have been committed
        again = []
        for new in calls:
            again.append((yield from enqueue(tx, new)))
        return again
    yield _insert_new([each for new in calls for each in new], tx.now)
    for new in calls:
        for each in new:
            tx.log_enqueued(each.rollout_id)
    tx.changes.waiting |= any(calls)
    return [[new_record(each, tx.now) for each in new] for new in calls]


def enqueue_named(tx: Transaction, calls: Sequence[Sequence[NewRollout]]) -> Operation[list[list[Rollout]]]:
    """Enqueues the rollouts of several callers, with ids that may exist and without resources."""
    names = [each.rollout_id for new in calls for each in new]
    if tx.alone and len(set(names)) == len(names) and not (yield EXISTING(ids=names)):
        return (yield from enqueue_many(tx, calls))
    there = []
    for new in calls:
        there.append((yield from enqueue(tx, new)))
    return there


def _insert_new(new: Sequence[NewRollout], now: float) -> Call:
    """Most rollouts have nothing but an input; their insert omits the columns that stay empty."""
    for each in new:
        if each.mode is not None or each.resources_id is not None or each.config.timeout_seconds is not None:
            return INSERT_NEW.many([_values(each, now) for each in new])
    return INSERT_PLAIN.many([_plain_values(each, now) for each in new])


def _values(new: NewRollout, now: float) -> tuple[Any, ...]:
    """The values of `INSERT_NEW`."""
    config = new.config
    return (
        new.rollout_id,
        now,
        new.mode,
        new.resources_id,
        config_to_bytes(config),
        config.timeout_seconds,
        config.unresponsive_seconds,
        new.metadata,
        new.priority,
        new.input,
    )


def _plain_values(new: NewRollout, now: float) -> tuple[Any, ...]:
    """The values of `INSERT_PLAIN`. Byte arrays, because SQLite's driver binds them faster than bytes."""
    return (
        new.rollout_id,
        now,
        bytearray(config_to_bytes(new.config)),
        new.config.unresponsive_seconds,
        bytearray(new.metadata),
        new.priority,
        bytearray(new.input),
    )


def new_record(new: NewRollout, now: float) -> Rollout:
    return Rollout(
        rollout_id=new.rollout_id,
        input=unpack(new.input),
        status=_QUEUING,
        start_time=now,
        mode=new.mode,
        resources_id=new.resources_id,
        config=new.config,
        metadata=unpack(new.metadata),
        priority=new.priority,
    )


def update_rollout(
    tx: Transaction,
    rollout_id: str,
    change: UpdateRollout,
    metadata: Mapping[str, Any] | None,
    reason: str | None,
) -> Operation[Rollout]:
    before = yield from lock_rollout(rollout_id)
    status = change.status
    if status is not None and not unchanged(RolloutStatus(before.status), status):
        check_caller_change(rollout_id, RolloutStatus(before.status), status)
    else:
        status = None
    packed = merged(before.metadata, metadata, "metadata")
    yield from require_resources([change.resources_id])
    config = before.config if change.config is None else change.config
    tx.held.forget(rollout_id)
    yield CHANGE(
        at_place=before.place,
        new_mode=before.mode if change.mode is None else change.mode,
        new_resources=before.resources_id if change.resources_id is None else change.resources_id,
        new_config=config_to_bytes(config),
        new_timeout=config.timeout_seconds,
        new_unresponsive=config.unresponsive_seconds,
        new_metadata=packed,
        new_priority=before.priority if change.priority is None else change.priority,
    )
    if status is not None:
        yield from withdraw(tx, before, status, reason or f"set to {status} by a caller")
    elif before.status in WAITING:
        tx.changes.waiting = True  # a concurrent claim skipped the locked row
    [row] = yield ROLLOUTS(ids=[rollout_id])
    return RolloutRow(*row).record()


def cancel(tx: Transaction, rollout_ids: Iterable[str], reason: str | None) -> Operation[list[str]]:
    wanted = list(dict.fromkeys(rollout_ids))
    found = {row[1]: RolloutRow(*row) for row in (yield LOCK(ids=wanted))}
    for rollout_id in wanted:
        if rollout_id not in found:
            raise NotFound(f"no rollout {rollout_id!r}")
    cancelled = [rollout_id for rollout_id in wanted if found[rollout_id].status not in FINAL_ROLLOUT]
    for rollout_id in cancelled:
        yield from withdraw(tx, found[rollout_id], RolloutStatus.CANCELLED, reason)
    return cancelled


def lock_rollout(rollout_id: str) -> Operation[RolloutRow]:
    rows = yield LOCK(ids=[rollout_id])
    if not rows:
        raise NotFound(f"no rollout {rollout_id!r}")
    return RolloutRow(*rows[0])


_insert = insert_into(rollouts, "place", *(column.name for column in rollouts.c if column.nullable)).values(
    status=constant(RolloutStatus.QUEUING.value),
    waiting=constant(1),
    tries=constant(0),
    attempts=constant(0),
    **{name: bindparam(name) for name in ("mode", "resources_id", "timeout_seconds", "unresponsive_seconds")},
)
INSERT_NEW = Statement(_insert)
INSERT_PLAIN = Statement(_insert.values(mode=null(), resources_id=null(), timeout_seconds=null()))
INSERT_ROLLOUT = Statement(
    _insert.on_conflict_do_nothing(index_elements=["rollout_id"]).returning(rollouts.c.rollout_id)
)
ROLLOUTS = Statement(select(*ROLLOUT_COLUMNS).where(any_of(rollouts.c.rollout_id, "ids")))
EXISTING = Statement(select(rollouts.c.place).where(any_of(rollouts.c.rollout_id, "ids")).limit(1))
LOCK = Statement(
    select(*ROLLOUT_COLUMNS)
    .where(any_of(rollouts.c.rollout_id, "ids"))
    .order_by(rollouts.c.place)
    .with_for_update()
)


CHANGE = Statement(
    update(rollouts)
    .where(rollouts.c.place == bindparam("at_place"))
    .values(
        mode=bindparam("new_mode"),
        resources_id=bindparam("new_resources"),
        config=bindparam("new_config"),
        timeout_seconds=bindparam("new_timeout"),
        unresponsive_seconds=bindparam("new_unresponsive"),
        metadata=bindparam("new_metadata"),
        priority=bindparam("new_priority"),
    )
)
