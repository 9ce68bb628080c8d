"""Operations that delete rows: released trajectories, finished rollouts, and the events of deleted rollouts."""

from collections.abc import Sequence
from itertools import takewhile

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
EVENTS_PAGE = 1_000
"""Events read at a time: most calls delete few."""


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
    found = [(row[0], row[1]) for row in rows]
    if found:
        yield from _keep_cursor(tx)
        yield DELETE_COMPLETIONS(ids=[rollout_id for _, rollout_id in found])
    return (yield from _delete(tx, found))


def delete_finished(tx: Transaction, older_than: float, limit: int) -> Operation[int]:
    yield from tx.write_gathered()
    old, last = [], 0
    for cursor, place, rollout_id, end_time in (yield OLDEST(count=limit)):
        if end_time >= tx.now - older_than:
            break
        old.append((place, rollout_id))
        last = cursor
    if old:
        yield from _keep_cursor(tx)
        yield DELETE_OLDEST(last=last)  # the log is read from its beginning, so these are all up to the last
    return (yield from _delete(tx, sorted(old)))


def _keep_cursor(tx: Transaction) -> Operation[None]:
    """The cursors of deleted completions must not be assigned again."""
    if tx.alone:
        yield KEEP_CURSOR()


def _delete(tx: Transaction, rows: Sequence[tuple[int, str]]) -> Operation[int]:
    """Deletes the rollouts, whose completions are deleted already, and the events before the oldest one left."""
    if rows:
        for statement in DELETE_BY_PLACE:
            yield statement.many([{"at_place": place} for place, _ in rows])
    for _, rollout_id in rows:
        tx.log_event(EventKind.DELETED, rollout_id)
    yield from tx.write_gathered()
    [[oldest]] = (yield OLDEST_START()) or [[tx.now]]
    for _ in range(EVENTS_AT_ONCE // EVENTS_PAGE):
        page = yield FIRST_EVENTS()
        old = [sequence for sequence, _ in takewhile(lambda event: event[1] < oldest, page)]
        if old:
            yield FORGET_EVENTS(last=old[-1])
        if len(old) < EVENTS_PAGE:
            break
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
    select(completions.c.cursor, completions.c.place, completions.c.rollout_id, completions.c.end_time)
    .order_by(completions.c.cursor)
    .limit(bindparam("count"))
)
OLDEST_START = Statement(select(rollouts.c.start_time).order_by(rollouts.c.place).limit(1))
FIRST_EVENTS = Statement(
    select(events.c.sequence, events.c.time).order_by(events.c.sequence).limit(EVENTS_PAGE)
)
FORGET_EVENTS = Statement(delete(events).where(events.c.sequence <= bindparam("last")))
KEEP_CURSOR = Statement(
    update(counters)
    .where(counters.c.name == constant(COMPLETIONS))
    .values(value=LAST_GIVEN.scalar_subquery())
)
DELETE_COMPLETIONS = Statement(delete(completions).where(any_of(completions.c.rollout_id, "ids")))
DELETE_OLDEST = Statement(delete(completions).where(completions.c.cursor <= bindparam("last")))
DELETE_BY_PLACE = [
    Statement(delete(attempts).where(*ATTEMPTS_OF_PLACE)),
    *(
        Statement(delete(table).where(table.c.place == bindparam("at_place")))
        for table in (journal, trajectories, rollouts)
    ),
]
