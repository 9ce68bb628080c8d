"""Operations that delete rows: released trajectories, finished rollouts, and the events of deleted rollouts."""

from collections.abc import Sequence

from sqlalchemy import bindparam, delete, select, update

from rollwright.store.errors import ImpossibleChange
from rollwright.store.records import EventKind, RolloutStatus
from rollwright.store.sql.attempts import ATTEMPTS_OF_PLACE
from rollwright.store.sql.schema import (
    attempts,
    completions,
    counters,
    events,
    journal,
    rollouts,
    trajectories,
)
from rollwright.store.sql.statements import Operation, Statement, any_of, constant
from rollwright.store.sql.transaction import COMPLETIONS, LAST_GIVEN, Transaction
from rollwright.store.transitions import FINAL_ROLLOUT

EVENTS_AT_ONCE = 100_000
"""Events deleted by one call: three for each rollout that one call of `delete_finished` deletes, and some more."""


def release_trajectories(tx: Transaction, rollout_ids: Sequence[str]) -> Operation[int]:
    yield from tx.write_gathered()  # else a trajectory of the same transaction would not be deleted
    rows = yield RELEASE_TRAJECTORIES(ids=list(dict.fromkeys(rollout_ids)))
    return len(rows)


def delete_rollouts(tx: Transaction, rollout_ids: Sequence[str]) -> Operation[int]:
    yield from tx.write_gathered()  # else a completion of the same transaction would not be deleted
    rows = yield PLACES(ids=list(dict.fromkeys(rollout_ids)))
    for _, rollout_id, status in rows:
        if status not in FINAL_ROLLOUT:
            raise ImpossibleChange(f"rollout {rollout_id} is {status}; only a final one can be deleted")
    return (yield from _delete(tx, [(row[0], row[1]) for row in rows]))


def delete_finished(tx: Transaction, older_than: float, limit: int) -> Operation[int]:
    yield from tx.write_gathered()
    old = []
    for place, rollout_id, end_time in (yield OLDEST(count=limit)):
        if end_time >= tx.now - older_than:
            break
        old.append((place, rollout_id))
    return (yield from _delete(tx, sorted(old)))


def _delete(tx: Transaction, rows: Sequence[tuple[int, str]]) -> Operation[int]:
    if rows:
        if tx.alone:
            yield KEEP_CURSOR()  # the cursors of deleted completions must not be assigned again
        yield DELETE_COMPLETIONS(ids=[rollout_id for _, rollout_id in rows])
        for statement in DELETE_BY_PLACE:
            yield statement.many([{"at_place": place} for place, _ in rows])
    for _, rollout_id in rows:
        tx.log_event(EventKind.DELETED, rollout_id)
    yield from tx.write_gathered()
    [[oldest]] = (yield OLDEST_START()) or [[tx.now]]
    last = None
    for sequence, time in (yield FIRST_EVENTS()):
        if time >= oldest:
            break
        last = sequence
    if last is not None:
        yield FORGET_EVENTS(last=last)
    return len(rows)


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
KEEP_CURSOR = Statement(
    update(counters)
    .where(counters.c.name == constant(COMPLETIONS))
    .values(value=LAST_GIVEN.scalar_subquery())
)
DELETE_COMPLETIONS = Statement(delete(completions).where(any_of(completions.c.rollout_id, "ids")))
DELETE_BY_PLACE = [
    Statement(delete(attempts).where(*ATTEMPTS_OF_PLACE)),
    *(
        Statement(delete(table).where(table.c.place == bindparam("at_place")))
        for table in (journal, trajectories, rollouts)
    ),
]
