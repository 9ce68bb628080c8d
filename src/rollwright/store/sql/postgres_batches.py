"""Calls of many callers as one PostgreSQL statement: new rollouts, claims, heartbeats, turns and successful ends.

Such a statement is a transaction of its own: one round trip, one commit, one flush for all its callers. It does what the
operation of its kind in `queue` and `attempts` does, under the same rules, for those callers for whom nothing is special.
For the others it changes nothing and returns `NOT_DONE`, and the driver runs their operation in an ordinary transaction,
which decides and explains: a lease that has expired, a row that another transaction has locked, a rejected report, a
claim that was made before. So a statement here never waits for a lock on a rollout, and never rejects a call.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import asyncpg  # type: ignore[import-untyped]

from rollwright.store.checks import config_to_bytes, new_id, unpack
from rollwright.store.records import Attempt, AttemptStatus, EventKind, RolloutStatus
from rollwright.store.sql import attempts as attempt_operations
from rollwright.store.sql import claims
from rollwright.store.sql import queue as queue_operations
from rollwright.store.sql.attempts import Append, Heartbeat, Report
from rollwright.store.sql.claims import Ask
from rollwright.store.sql.postgres_recent import StatementNews
from rollwright.store.sql.postgres_statements import (
    ALIVE,
    APPEND,
    CLAIM,
    ENQUEUE,
    EXTEND,
    FINISH,
    FINISH_AND_CLAIM,
    GIVEN,
    WAITS,
)
from rollwright.store.sql.queue import new_record
from rollwright.store.sql.rows import RolloutRow
from rollwright.store.sql.transaction import Changes

MOST_SLOTS = 1024
"""Most rollouts claimed by one statement: a caller's place in it is looked up by its number, in linear time."""
COPY_ROWS = 200
"""Fewest new rollouts of one batch that are worth a `COPY`, which takes a transaction of four round trips."""

NOT_DONE: Any = object()
"""Instead of a result: the call has changed nothing and needs an ordinary transaction."""

Given = tuple[list[Any], Changes]
"""A result or `NOT_DONE` for each call, and the changes that waiting calls depend on."""
Run = Callable[["asyncpg.Connection", StatementNews, Sequence[Any]], Awaitable[Given]]


class _Claimed(NamedTuple):
    """What a row of `CLAIM` begins with, before the columns of the rollout."""

    now: float
    blocked: bool
    number: int | None


async def enqueue(connection: "asyncpg.Connection", news: StatementNews, calls: Sequence[Any]) -> Given:
    new = [each for call in calls for each in call]
    rows = [
        (
            each.rollout_id,
            each.mode,
            each.resources_id,
            config_to_bytes(each.config),
            each.config.timeout_seconds,
            each.config.unresponsive_seconds,
            each.metadata,
            each.priority,
            each.input,
        )
        for each in new
    ]
    if len(rows) >= COPY_ROWS:
        now = await _copy(connection, rows)
        return [[new_record(each, now) for each in call] for call in calls], Changes(waiting=True)
    entered = {name: now for now, name in await connection.fetch(ENQUEUE, *_columns(rows, 9))}
    news.now = next(iter(entered.values()), None)
    given: list[Any] = []
    # An id that existed, or that a call before it has just entered, is looked up by the transaction.
    for call in calls:
        times = [entered.pop(each.rollout_id, None) for each in call]
        given.append(
            NOT_DONE
            if None in times
            else [new_record(each, now) for each, now in zip(call, times, strict=True)]
        )
    return given, Changes(waiting=bool(rows))


async def _copy(connection: "asyncpg.Connection", rows: Sequence[tuple[Any, ...]]) -> float:
    async with connection.transaction():
        now: float = await connection.fetchval("SELECT store_now()")
        waits = (RolloutStatus.QUEUING.value, 1, now, 0, 0)
        await connection.copy_records_to_table(
            "rollouts", records=[row + waits for row in rows], columns=[*GIVEN, *WAITS]
        )
        await connection.copy_records_to_table(
            "events",
            records=[(now, EventKind.ENQUEUED.value, row[0]) for row in rows],
            columns=["time", "kind", "rollout_id"],
        )
    return now


async def claim(connection: "asyncpg.Connection", news: StatementNews, asks: Sequence[Ask]) -> Given:
    slots = [ask for ask in asks for _ in range(ask[0])]
    claim_ids = [ask[2] for ask in asks if ask[2] is not None]
    if len(slots) > MOST_SLOTS or len(set(claim_ids)) < len(claim_ids):
        return [NOT_DONE] * len(asks), Changes()
    rows = await connection.fetch(
        CLAIM, len(slots), [ask[1] for ask in slots], [ask[2] for ask in slots], new_id("at")
    )
    now, blocked, number = _Claimed(*rows[0][:3])
    news.now = now
    if blocked:
        return [NOT_DONE] * len(asks), Changes()
    news.claimed = [] if number is None else [RolloutRow(*row[3:]) for row in rows]
    claimed = [row.attempted() for row in news.claimed]
    given: list[Any] = []
    changes, first = Changes(), 0
    for limit, worker_id, _ in asks:
        mine = claimed[first : first + limit]
        news.stamps.record(worker_id, now, asks=True, busy=bool(mine))
        given.append(mine)
        first += limit
    for each in claimed:
        if each.attempt.lease_expires is not None:
            changes.lease = min(changes.lease, each.attempt.lease_expires)
    return given, changes


async def claim_for_waiting(
    connection: "asyncpg.Connection", news: StatementNews, calls: Sequence[Sequence[Ask]]
) -> Given:
    """Claims for callers who wait: a list for each who gets something, from the first."""
    given, changes = await claim(connection, news, [ask for asks in calls for ask in asks])
    served: list[Any] = []
    for asks in calls:
        mine, given = given[: len(asks)], given[len(asks) :]
        served.append(NOT_DONE if NOT_DONE in mine else [each for each in mine if each])
    return served, changes


async def finish(connection: "asyncpg.Connection", news: StatementNews, reports: Sequence[Report]) -> Given:
    usual = _usual_ends(reports)
    given: list[Any] = [NOT_DONE] * len(reports)
    rows = (await connection.fetch(FINISH, *_columns(usual, 5))) if usual else []
    for number, *ended in rows:
        given[number] = _ended(news, *ended)
    return given, Changes(completed=bool(rows))


async def finish_and_claim(
    connection: "asyncpg.Connection", news: StatementNews, calls: Sequence[tuple[Report, Ask]]
) -> Given:
    """A list for each caller whose attempt was ended: the rollout that it claimed, if one was waiting."""
    given: list[Any] = [NOT_DONE] * len(calls)
    # A caller's number is its place in the arrays: those whose report is not usual are left out of them.
    places = [number for number, _, _, _, _ in _usual_ends([report for report, _ in calls])]
    asks = [calls[place][1] for place in places]
    claim_ids = [claim_id for _, _, claim_id in asks if claim_id is not None]
    if not places or len(set(claim_ids)) < len(claim_ids):
        return given, Changes()
    usual = _usual_ends([calls[place][0] for place in places])
    rows = await connection.fetch(
        FINISH_AND_CLAIM, *_columns(usual, 5), [claim_id for _, _, claim_id in asks], new_id("at")
    )
    changes = Changes(completed=bool(rows))
    for row in rows:
        number, *ended = row[:_ENDED_WIDTH]
        _ended(news, *ended)
        claimed = []
        if row[_ENDED_WIDTH] is not None:
            news.claimed.append(RolloutRow(*row[_ENDED_WIDTH + 1 :]))
            claimed.append(news.claimed[-1].attempted())
        news.stamps.record(asks[number][1], ended[0], asks=True, busy=bool(claimed))
        for each in claimed:
            if each.attempt.lease_expires is not None:
                changes.lease = min(changes.lease, each.attempt.lease_expires)
        given[places[number]] = claimed
    return given, changes


_ENDED_WIDTH = 9
"""Columns of an ended attempt in a row of `FINISH_AND_CLAIM`, before the caller's number and the claimed rollout."""


def _usual_ends(reports: Sequence[Report]) -> list[tuple[int, str, str, str | None, bytes | None]]:
    """The arguments of `FINISH`: successes without a remark."""
    return [
        (number, each.rollout_id, each.attempt_id, each.worker_id, each.trajectory)
        for number, each in enumerate(reports)
        if each.status is AttemptStatus.SUCCEEDED and each.reason is None and not each.metadata
    ]


def _ended(
    news: StatementNews,
    now: float,
    rollout_id: str,
    attempt_id: str,
    sequence_id: int,
    start: float,
    worker_id: str | None,
    lease: float | None,
    metadata: bytes,
) -> Attempt:
    news.now = now
    news.ended.append(rollout_id)
    news.stamps.record(worker_id, now)
    news.stamps.record_release(worker_id, now)
    return Attempt(
        rollout_id,
        attempt_id,
        sequence_id,
        AttemptStatus.SUCCEEDED,
        start,
        now,
        worker_id,
        now,
        lease,
        None,
        unpack(metadata),
    )


async def keep_alive(
    connection: "asyncpg.Connection", news: StatementNews, beats: Sequence[Heartbeat]
) -> Given:
    pairs = [
        (number, worker_id, *pair)
        for number, (worker_id, _, played) in enumerate(beats)
        for pair in played or ()
    ]
    alive = await connection.fetch(ALIVE, *_columns(pairs, 4)) if pairs else []
    changes = Changes()
    if late := [row[2] for row in alive if row[3]]:
        for (lease,) in await connection.fetch(EXTEND, late):
            if lease is not None:
                changes.lease = min(changes.lease, lease)
    held = Counter(row[0] for row in alive)
    given: list[Any] = [NOT_DONE] * len(beats)
    for number, (worker_id, stats, played) in enumerate(beats):
        if played and held[number] == len(played):
            news.stamps.record(worker_id, alive[0][1], stats=stats)
            given[number] = []
    return given, changes


async def append(connection: "asyncpg.Connection", news: StatementNews, appends: Sequence[Append]) -> Given:
    calls = [(number, *call[:2], call[3]) for number, call in enumerate(appends)]
    entries = [(number, bytes(entry)) for number, call in enumerate(appends) for entry in call[2]]
    rows = await connection.fetch(APPEND, *_columns(calls, 4), *_columns(entries, 2))
    given: list[Any] = [NOT_DONE] * len(appends)
    changes = Changes()
    for number, now, worker_id, lease in rows:
        given[number] = None
        news.stamps.record(worker_id, now)
        if lease is not None:
            changes.lease = min(changes.lease, lease)
    return given, changes


def _columns(rows: Sequence[tuple[Any, ...]], width: int) -> list[Sequence[Any]]:
    return list(zip(*rows, strict=True)) if rows else [()] * width


BATCHES: Mapping[Any, Run] = {
    queue_operations.enqueue_many: enqueue,
    queue_operations.enqueue_named: enqueue,
    claims.claim_many: claim,
    claims.claim_once: claim,
    claims.serve: claim_for_waiting,
    attempt_operations.report_many: finish,
    claims.finish_and_claim: finish_and_claim,
    claims.finish_and_claim_once: finish_and_claim,
    attempt_operations.record_heartbeats: keep_alive,
    attempt_operations.append_once: append,
}
"""The statement for each kind of operation that several callers can share."""
