"""Claims of waiting rollouts: for one caller, for several in one transaction, and for callers that wait.

As in `queue`, an operation checks everything that can be rejected before its first write.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from msgspec.structs import replace
from sqlalchemy import ColumnElement, Double, String, bindparam, cast, null, select, update

from rollwright.store.checks import NewRollout, new_id, unpack
from rollwright.store.errors import ImpossibleChange, StoreError
from rollwright.store.records import (
    AttemptedRollout,
    RolloutStatus,
)
from rollwright.store.sql.attempts import Report, report_many
from rollwright.store.sql.changes import lease_from
from rollwright.store.sql.queue import enqueue, lock_rollout
from rollwright.store.sql.rows import ROLLOUT_COLUMNS, RolloutRow, stored_config
from rollwright.store.sql.schema import CLAIMED as IS_CLAIMED
from rollwright.store.sql.schema import WAITING as IS_WAITING
from rollwright.store.sql.schema import rollouts
from rollwright.store.sql.statements import Operation, Row, Statement, any_of, constant
from rollwright.store.sql.transaction import Transaction
from rollwright.store.transitions import WAITING, lease_end

_PREPARING = RolloutStatus.PREPARING
"""Looked up once: access to an enum member costs as much as creating a small record."""


Ask = tuple[int, str | None, str | None]
"""Most rollouts to claim, the worker's id, the claim id."""


def claim(
    tx: Transaction, limit: int, worker_id: str | None, claim_id: str | None, *, new: bool = False
) -> Operation[list[AttemptedRollout]]:
    """Claims for one caller. `new`: the claim id was generated for this call, so only a repetition can find it used."""
    if claim_id is not None and (tx.repeated or not new):
        held = yield CLAIMED(claim_id=claim_id)
        if held:
            return [RolloutRow(*row).attempted() for row in held]
    tx.stamps.record(worker_id, tx.now, asks=True)
    attempt = _attempt(tx, worker_id, claim_id)
    rows = yield (CLAIM_NEXT(**attempt) if limit == 1 else CLAIM(**attempt, count=limit))
    return _register_claims(tx, rows)


def claim_many(tx: Transaction, asks: Sequence[Ask]) -> Operation[list[list[AttemptedRollout]]]:
    """Claims for several callers, with claim ids that were generated for these calls."""
    if tx.repeated or len(asks) == 1:
        given = []
        for ask in asks:
            given.append((yield from claim(tx, *ask, new=True)))
        return given
    return (yield from _claim_together(tx, asks))


def claim_once(tx: Transaction, asks: Sequence[Ask]) -> Operation[list[list[AttemptedRollout]]]:
    """Claims for several callers, whose claim ids may have been used before."""
    names = [claim_id for _, _, claim_id in asks if claim_id is not None]
    if len(asks) > 1 and len(set(names)) == len(names) and not (yield USED(ids=names)):
        return (yield from _claim_together(tx, asks))
    given = []
    for ask in asks:
        given.append((yield from claim(tx, *ask)))
    return given


def finish_and_claim(
    tx: Transaction, calls: Sequence[tuple[Report, Ask]]
) -> Operation[list[list[AttemptedRollout] | StoreError]]:
    """Ends an attempt for each of several callers, and claims the next rollout for each whose report is accepted. The claim
    ids were generated for these calls."""
    return (yield from _finish_then(claim_many, tx, calls))


def finish_and_claim_once(
    tx: Transaction, calls: Sequence[tuple[Report, Ask]]
) -> Operation[list[list[AttemptedRollout] | StoreError]]:
    """The same, with claim ids that may have been used before."""
    return (yield from _finish_then(claim_once, tx, calls))


def _finish_then(
    claim_next: Callable[[Transaction, Sequence[Ask]], Operation[list[list[AttemptedRollout]]]],
    tx: Transaction,
    calls: Sequence[tuple[Report, Ask]],
) -> Operation[list[list[AttemptedRollout] | StoreError]]:
    ends = yield from report_many(tx, [report for report, _ in calls])
    accepted = [ask for end, (_, ask) in zip(ends, calls, strict=True) if not isinstance(end, StoreError)]
    claimed = iter((yield from claim_next(tx, accepted)) if accepted else ())
    return [end if isinstance(end, StoreError) else next(claimed) for end in ends]


def _claim_together(tx: Transaction, asks: Sequence[Ask]) -> Operation[list[list[AttemptedRollout]]]:
    """Claims with unused claim ids."""
    given: list[list[AttemptedRollout]] = []
    rows = yield NEXT(count=sum(limit for limit, _, _ in asks))
    next_row, taken, name = iter(rows), [], new_id("at")
    for limit, worker_id, claim_id in asks:
        begun = [_begin_attempt(tx, row, worker_id, name) for row in islice(next_row, limit)]
        tx.stamps.record(worker_id, tx.now, asks=True, busy=bool(begun))
        taken += [_take_values(held, claim_id) for held, _ in begun]
        given.append([claimed for _, claimed in begun])
    if taken:
        yield TAKE.many(taken)
    return given


def _begin_attempt(
    tx: Transaction, row: Row, worker_id: str | None, name: str
) -> tuple[RolloutRow, AttemptedRollout]:
    """A row of `NEXT` with a new attempt, which `TAKE` has to write. `name`: the common part of the attempts' ids."""
    place, rollout_id, start_time, mode, resources_id, packed, metadata, priority, tries, attempts, input = (
        row
    )
    config, attempt_id = stored_config(packed), f"{name}.{place}"
    lease = lease_end(config, tx.now, tx.now)
    held = RolloutRow(
        place,
        rollout_id,
        _PREPARING._value_,
        start_time,
        None,
        mode,
        resources_id,
        packed,
        metadata,
        priority,
        tries + 1,
        attempts + 1,
        attempt_id,
        worker_id,
        attempt_start=tx.now,
        last_heartbeat_time=tx.now,
        lease_expires=lease,
        last_append_id=None,
        attempt_metadata=None,
    )
    tx.held.keep(held)
    tx.note_lease(lease)
    tx.log_claimed(rollout_id, attempt_id, worker_id, lease)
    claimed = AttemptedRollout(
        rollout_id,
        unpack(input),
        _PREPARING,
        start_time,
        None,
        mode,
        resources_id,
        config,
        unpack(metadata),
        priority,
        attempt=held.attempt(),
    )
    return held, claimed


def _take_values(held: RolloutRow, claim_id: str | None) -> tuple[Any, ...]:
    """The values of `TAKE`."""
    return (
        held.tries,
        held.attempts,
        held.attempt_id,
        held.worker_id,
        claim_id,
        held.attempt_start,
        held.last_heartbeat_time,
        held.lease_expires,
        held.place,
    )


def serve(tx: Transaction, calls: Sequence[Sequence[Ask]]) -> Operation[list[list[list[AttemptedRollout]]]]:
    """`claim_for_each`, for each of several lists of callers."""
    served = []
    for claimants in calls:
        served.append((yield from claim_for_each(tx, claimants)))
    return served


def claim_for_each(tx: Transaction, claimants: Sequence[Ask]) -> Operation[list[list[AttemptedRollout]]]:
    """Claims for waiting callers in their order, until the queue is empty."""
    served = []
    for limit, worker_id, claim_id in claimants:
        given = yield from claim(tx, limit, worker_id, claim_id)
        if not given:
            break
        served.append(given)
    return served


def start(
    tx: Transaction, rollout_id: str, worker_id: str | None, claim_id: str | None
) -> Operation[AttemptedRollout]:
    row = yield from lock_rollout(rollout_id)
    if claim_id is not None and (yield CLAIMED_ONE(claim_id=claim_id, rollout_id=rollout_id)):
        return row.attempted()
    if row.status not in WAITING:
        raise ImpossibleChange(f"rollout {rollout_id} is {row.status}; only a waiting one can be claimed")
    [given] = _register_claims(tx, (yield CLAIM_ONE(**_attempt(tx, worker_id, claim_id), at_place=row.place)))
    return given


def start_new(
    tx: Transaction, new: NewRollout, worker_id: str | None, claim_id: str | None
) -> Operation[AttemptedRollout]:
    yield from enqueue(tx, [new])
    return (yield from start(tx, new.rollout_id, worker_id, claim_id))


def _attempt(tx: Transaction, worker_id: str | None, claim_id: str | None) -> dict[str, Any]:
    """The values of a claim. An attempt's id is `new_attempt` followed by the rollout's place."""
    return {"new_attempt": new_id("at"), "new_worker": worker_id, "new_claim": claim_id, "now": tx.now}


def _register_claims(tx: Transaction, rows: Sequence[Row]) -> list[AttemptedRollout]:
    given = sorted((RolloutRow(*row) for row in rows), key=lambda row: (-row.priority, row.place))
    claimed = [row.attempted() for row in given]
    for row, each in zip(given, claimed, strict=True):
        attempt = each.attempt
        tx.note_lease(attempt.lease_expires)
        tx.log_claimed(attempt.rollout_id, attempt.attempt_id, attempt.worker_id, attempt.lease_expires)
        tx.stamps.record(attempt.worker_id, tx.now, busy=True)
        tx.held.keep(replace(row, input=b""))
    return claimed


_now: ColumnElement[float] = bindparam("now", type_=Double)


_claim = (
    update(rollouts)
    .values(
        status=constant(RolloutStatus.PREPARING.value),
        waiting=constant(0),
        tries=rollouts.c.tries + constant(1),
        attempts=rollouts.c.attempts + constant(1),
        attempt_id=bindparam("new_attempt", type_=String) + constant(".") + cast(rollouts.c.place, String),
        worker_id=bindparam("new_worker"),
        claim_id=bindparam("new_claim"),
        attempt_start=_now,
        last_heartbeat_time=_now,
        lease_expires=lease_from(_now, _now),
        attempt_metadata=null(),
    )
    .returning(*ROLLOUT_COLUMNS)
)


_next = (
    select(rollouts.c.place)
    .where(IS_WAITING)
    .order_by(rollouts.c.priority.desc(), rollouts.c.place)
    .with_for_update(skip_locked=True)
)


_several = _next.limit(bindparam("count")).cte("several")


_KNOWN = [
    rollouts.c.place,
    rollouts.c.rollout_id,
    rollouts.c.start_time,
    rollouts.c.mode,
    rollouts.c.resources_id,
    rollouts.c.config,
    rollouts.c.metadata,
    rollouts.c.priority,
    rollouts.c.tries,
    rollouts.c.attempts,
    rollouts.c.input,
]
"""Columns that a waiting rollout fills; the others belong to its attempt or its end."""


NEXT = Statement(_next.with_only_columns(*_KNOWN).limit(bindparam("count")))


TAKE = Statement(
    update(rollouts)
    .where(rollouts.c.place == bindparam("at_place"))
    .values(
        status=constant(RolloutStatus.PREPARING.value),
        waiting=constant(0),
        tries=bindparam("new_tries"),
        attempts=bindparam("new_attempts"),
        attempt_id=bindparam("new_attempt"),
        worker_id=bindparam("new_worker"),
        claim_id=bindparam("new_claim"),
        attempt_start=bindparam("new_start"),
        last_heartbeat_time=bindparam("new_heartbeat"),
        lease_expires=bindparam("new_lease"),
        attempt_metadata=null(),
    )
)


CLAIM = Statement(_claim.where(rollouts.c.place.in_(select(_several.c.place))))


CLAIM_NEXT = Statement(_claim.where(rollouts.c.place == _next.limit(constant(1)).scalar_subquery()))


CLAIM_ONE = Statement(_claim.where(rollouts.c.place == bindparam("at_place")))


_claimed = select(*ROLLOUT_COLUMNS).where(rollouts.c.claim_id == bindparam("claim_id"), IS_CLAIMED)


CLAIMED = Statement(_claimed.order_by(rollouts.c.priority.desc(), rollouts.c.place))


USED = Statement(select(rollouts.c.place).where(any_of(rollouts.c.claim_id, "ids"), IS_CLAIMED).limit(1))


CLAIMED_ONE = Statement(_claimed.where(rollouts.c.rollout_id == bindparam("rollout_id")))
