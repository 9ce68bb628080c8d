"""Calls of many callers as one PostgreSQL statement: new rollouts, claims, heartbeats, turns and successful ends.

Such a statement is a transaction of its own: one round trip, one commit, one flush for all its callers. It does what the
operation of its kind in `queue` and `attempts` does, under the same rules, for those callers for whom nothing is special.
For the others it changes nothing and returns `NOT_DONE`, and the driver runs their operation in an ordinary transaction,
which decides and explains: a lease that has expired, a row that another transaction has locked, a rejected report, a
claim that was made before. So a statement here never waits for a lock on a rollout, and never rejects a call.

The time is the server's, read once by each statement. Rows are joined through their indexes whatever the planner knows
about the tables (`SETTINGS`): one generic plan serves two rows and a million.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import asyncpg  # type: ignore[import-untyped]

from rollwright.store.checks import EMPTY, config_to_bytes, new_id, unpack
from rollwright.store.records import Attempt, AttemptStatus, EventKind, RolloutStatus
from rollwright.store.sql import attempts as attempt_operations
from rollwright.store.sql import claims
from rollwright.store.sql import queue as queue_operations
from rollwright.store.sql.attempts import Append, Heartbeat, Report
from rollwright.store.sql.claims import Ask
from rollwright.store.sql.queue import new_record
from rollwright.store.sql.rows import ROLLOUT_COLUMNS, RolloutRow
from rollwright.store.sql.schema import ATTEMPTS_OF_ONE, CLAIMED, HELD, WAITING
from rollwright.store.sql.transaction import COMPLETIONS, Changes, Stamps
from rollwright.store.transitions import ATTEMPT_CHANGES, SAME_MOMENT

SETTINGS = {
    "plan_cache_mode": "force_generic_plan",  # planning takes longer than executing
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_seqscan": "off",
    "jit": "off",
}
"""Of the connections that write: all their statements look rows up by index, also in tables that grew since the plan."""

MOST_SLOTS = 1024
"""Most rollouts claimed by one statement: a caller's place in it is looked up by its number, in linear time."""
COPY_ROWS = 200
"""Fewest new rollouts of one batch that are worth a `COPY`, which takes a transaction of four round trips."""

NOT_DONE: Any = object()
"""Instead of a result: the call has changed nothing and needs an ordinary transaction."""

Given = tuple[list[Any], Changes]
"""A result or `NOT_DONE` for each call, and the changes that waiting calls depend on."""
Run = Callable[["asyncpg.Connection", Stamps, Sequence[Any]], Awaitable[Given]]


class _Claimed(NamedTuple):
    """What a row of `CLAIM` begins with, before the columns of the rollout."""

    now: float
    blocked: bool
    number: int | None


async def enqueue(connection: "asyncpg.Connection", stamps: Stamps, calls: Sequence[Any]) -> Given:
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
    given: list[Any] = []
    for call in (
        calls
    ):  # an id that existed, or that a call before it has just entered, is looked up by the transaction
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
            "rollouts", records=[row + waits for row in rows], columns=[*_GIVEN, *_WAITS]
        )
        await connection.copy_records_to_table(
            "events",
            records=[(now, EventKind.ENQUEUED.value, row[0]) for row in rows],
            columns=["time", "kind", "rollout_id"],
        )
    return now


async def claim(connection: "asyncpg.Connection", stamps: Stamps, asks: Sequence[Ask]) -> Given:
    slots = [ask for ask in asks for _ in range(ask[0])]
    claim_ids = [ask[2] for ask in asks if ask[2] is not None]
    if len(slots) > MOST_SLOTS or len(set(claim_ids)) < len(claim_ids):
        return [NOT_DONE] * len(asks), Changes()
    rows = await connection.fetch(
        CLAIM, len(slots), [ask[1] for ask in slots], [ask[2] for ask in slots], new_id("at")
    )
    now, blocked, number = _Claimed(*rows[0][:3])
    if blocked:
        return [NOT_DONE] * len(asks), Changes()
    claimed = [] if number is None else [RolloutRow(*row[3:]).attempted() for row in rows]
    given: list[Any] = []
    changes, first = Changes(), 0
    for limit, worker_id, _ in asks:
        mine = claimed[first : first + limit]
        stamps.record(worker_id, now, asks=True, busy=bool(mine))
        given.append(mine)
        first += limit
    for each in claimed:
        if each.attempt.lease_expires is not None:
            changes.lease = min(changes.lease, each.attempt.lease_expires)
    return given, changes


async def claim_for_waiting(
    connection: "asyncpg.Connection", stamps: Stamps, calls: Sequence[Sequence[Ask]]
) -> Given:
    """Claims for callers who wait: a list for each who gets something, from the first."""
    given, changes = await claim(connection, stamps, [ask for asks in calls for ask in asks])
    served: list[Any] = []
    for asks in calls:
        mine, given = given[: len(asks)], given[len(asks) :]
        served.append(NOT_DONE if NOT_DONE in mine else [each for each in mine if each])
    return served, changes


async def finish(connection: "asyncpg.Connection", stamps: Stamps, reports: Sequence[Report]) -> Given:
    usual = [
        (number, each.rollout_id, each.attempt_id, each.worker_id, each.trajectory)
        for number, each in enumerate(reports)
        if each.status is AttemptStatus.SUCCEEDED and each.reason is None and not each.metadata
    ]
    given: list[Any] = [NOT_DONE] * len(reports)
    rows = (await connection.fetch(FINISH, *_columns(usual, 5))) if usual else []
    for number, now, rollout_id, attempt_id, sequence_id, start, worker_id, lease, metadata in rows:
        stamps.record(worker_id, now)
        stamps.record_release(worker_id, now)
        given[number] = Attempt(
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
    return given, Changes(completed=bool(rows))


async def keep_alive(connection: "asyncpg.Connection", stamps: Stamps, beats: Sequence[Heartbeat]) -> Given:
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
            stamps.record(worker_id, alive[0][1], stats=stats)
            given[number] = []
    return given, changes


async def append(connection: "asyncpg.Connection", stamps: Stamps, appends: Sequence[Append]) -> Given:
    calls = [(number, *call[:2], call[3]) for number, call in enumerate(appends)]
    entries = [(number, bytes(entry)) for number, call in enumerate(appends) for entry in call[2]]
    rows = await connection.fetch(APPEND, *_columns(calls, 4), *_columns(entries, 2))
    given: list[Any] = [NOT_DONE] * len(appends)
    changes = Changes()
    for number, now, worker_id, lease in rows:
        given[number] = None
        stamps.record(worker_id, now)
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
    attempt_operations.record_heartbeats: keep_alive,
    attempt_operations.append_once: append,
}
"""The statement for each kind of operation that several callers can share."""


_GIVEN = (
    "rollout_id",
    "mode",
    "resources_id",
    "config",
    "timeout_seconds",
    "unresponsive_seconds",
    "metadata",
    "priority",
    "input",
)
_WAITS = ("status", "waiting", "start_time", "tries", "attempts")
_CLOCK = "clock AS MATERIALIZED (SELECT store_now() AS now)"
_ROLLOUT = ", ".join(f"r.{column.name}" for column in ROLLOUT_COLUMNS)
_MAY_SUCCEED = ", ".join(
    f"'{status}'" for status, after in ATTEMPT_CHANGES.items() if AttemptStatus.SUCCEEDED in after
)
_IS_NEWS = (
    "(r.unresponsive_seconds IS NULL"
    f" OR now - r.last_heartbeat_time >= r.unresponsive_seconds * {SAME_MOMENT})"
)
"""`transitions.is_news` in SQL."""
_ALIVE = "(r.lease_expires IS NULL OR r.lease_expires > now)"


def _lease(start: str) -> str:
    """`transitions.lease_end` in SQL: `LEAST` ignores limits that are not set."""
    return f"LEAST(now + r.unresponsive_seconds, {start} + r.timeout_seconds)"


ENQUEUE = f"""
WITH {_CLOCK},
given AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::bytea[], $5::float8[], $6::float8[], $7::bytea[],
        $8::int[], $9::bytea[]) AS given ({", ".join(_GIVEN)})
),
entered AS (
    INSERT INTO rollouts ({", ".join(_GIVEN)}, {", ".join(_WAITS)})
    SELECT given.*, '{RolloutStatus.QUEUING}', 1, now, 0, 0 FROM given, clock
    ON CONFLICT (rollout_id) DO NOTHING RETURNING start_time, rollout_id
),
logged AS (
    INSERT INTO events (time, kind, rollout_id)
    SELECT start_time, '{EventKind.ENQUEUED}', rollout_id FROM entered
)
SELECT start_time, rollout_id FROM entered
"""

CLAIM = f"""
WITH {_CLOCK},
block AS MATERIALIZED (
    SELECT coalesce((SELECT min(lease_expires) FROM rollouts WHERE {HELD}) <= now, false)
        OR EXISTS (SELECT FROM rollouts WHERE claim_id = ANY($3::text[]) AND {CLAIMED}) AS blocked
    FROM clock
),
free AS MATERIALIZED (
    SELECT place, priority FROM rollouts WHERE {WAITING} AND NOT (SELECT blocked FROM block)
    ORDER BY priority DESC, place LIMIT $1 FOR UPDATE SKIP LOCKED
),
numbered AS MATERIALIZED (
    SELECT place, row_number() OVER (ORDER BY priority DESC, place) AS number FROM free
),
taken AS (
    UPDATE rollouts AS r SET
        status = '{RolloutStatus.PREPARING}', waiting = 0, tries = tries + 1, attempts = attempts + 1,
        attempt_id = $4::text || '.' || r.place, worker_id = ($2::text[])[number], claim_id = ($3::text[])[number],
        attempt_start = now, last_heartbeat_time = now, lease_expires = {_lease("now")}, attempt_metadata = NULL
    FROM numbered, clock WHERE r.place = numbered.place
    RETURNING number, {_ROLLOUT}
),
logged AS (
    INSERT INTO events (time, kind, rollout_id, attempt_id, worker_id, lease_expires)
    SELECT now, '{EventKind.CLAIMED}', rollout_id, attempt_id, worker_id, lease_expires FROM taken, clock
)
SELECT now, blocked, taken.* FROM clock CROSS JOIN block LEFT JOIN taken ON true ORDER BY number
"""
"""Claims nothing while an expired lease has to be ended first, whose rollout may be the next, or a claim id is used."""

FINISH = f"""
WITH {_CLOCK},
given AS MATERIALIZED (
    SELECT * FROM unnest($1::int[], $2::text[], $3::text[], $4::text[], $5::bytea[])
        AS given (number, rollout_id, attempt_id, worker_id, trajectory)
),
held AS MATERIALIZED (
    SELECT number, now, r.place, r.rollout_id, r.attempt_id, r.attempts, r.attempt_start,
        coalesce(r.worker_id, given.worker_id) AS worker_id, r.lease_expires,
        coalesce(r.attempt_metadata, '\\x{EMPTY.hex()}'::bytea) AS metadata, r.status, trajectory
    FROM given JOIN rollouts AS r ON r.rollout_id = given.rollout_id CROSS JOIN clock
    WHERE r.attempt_id = given.attempt_id AND r.status IN ({_MAY_SUCCEED}) AND {_ALIVE}
        AND (given.worker_id IS NULL OR r.worker_id IS NULL OR r.worker_id = given.worker_id)
    FOR UPDATE OF r SKIP LOCKED
),
ended AS MATERIALIZED (
    SELECT * FROM held WHERE number IN (SELECT min(number) FROM held GROUP BY place)
),
released AS (
    UPDATE rollouts AS r SET
        status = '{RolloutStatus.SUCCEEDED}', waiting = 0, end_time = now, attempt_id = NULL, worker_id = NULL,
        claim_id = NULL, attempt_start = NULL, last_heartbeat_time = NULL, lease_expires = NULL,
        last_append_id = NULL, attempt_metadata = NULL
    FROM ended WHERE r.place = ended.place
),
archived AS (
    INSERT INTO attempts (number, place, sequence_id, attempt_id, status, start_time, end_time, worker_id,
        last_heartbeat_time, lease_expires, metadata, taken)
    SELECT place * {ATTEMPTS_OF_ONE} + attempts, place, attempts, attempt_id, '{AttemptStatus.SUCCEEDED}',
        attempt_start, now, worker_id, now, lease_expires, metadata, 0
    FROM ended
),
kept AS (
    INSERT INTO trajectories (place, data) SELECT place, trajectory FROM ended WHERE trajectory IS NOT NULL
),
cleared AS (
    DELETE FROM journal USING ended
    WHERE journal.place = ended.place AND (ended.attempts > 1 OR ended.status = '{AttemptStatus.RUNNING}')
),
logged AS (
    INSERT INTO events (time, kind, rollout_id, attempt_id, worker_id, status, lease_expires, becomes)
    SELECT now, '{EventKind.ENDED}', rollout_id, attempt_id, worker_id, '{AttemptStatus.SUCCEEDED}', lease_expires,
        '{RolloutStatus.SUCCEEDED}'
    FROM ended
),
counted AS (
    UPDATE counters SET value = value + (SELECT count(*) FROM ended)
    WHERE name = '{COMPLETIONS}' AND EXISTS (SELECT FROM ended) RETURNING value
),
completed AS (
    INSERT INTO completions (cursor, place, rollout_id, attempt_id, status, end_time)
    SELECT value - row_number() OVER (ORDER BY number DESC) + 1, place, rollout_id, attempt_id,
        '{RolloutStatus.SUCCEEDED}', now
    FROM ended CROSS JOIN counted
)
SELECT number, now, rollout_id, attempt_id, attempts, attempt_start, worker_id, lease_expires, metadata FROM ended
"""
"""The first of several equal reports is taken; the others are repetitions."""

ALIVE = f"""
SELECT number, now, r.place, {_IS_NEWS}
FROM unnest($1::int[], $2::text[], $3::text[], $4::text[]) AS given (number, worker_id, rollout_id, attempt_id)
JOIN rollouts AS r ON r.rollout_id = given.rollout_id CROSS JOIN (SELECT store_now() AS now OFFSET 0) AS clock
WHERE r.attempt_id = given.attempt_id AND r.worker_id = given.worker_id AND {_ALIVE}
"""
EXTEND = f"""
WITH {_CLOCK},
free AS MATERIALIZED (
    SELECT r.place FROM unnest($1::bigint[]) AS late (place) JOIN rollouts AS r ON r.place = late.place CROSS JOIN clock
    WHERE {HELD} AND {_ALIVE} FOR UPDATE OF r SKIP LOCKED
)
UPDATE rollouts AS r SET last_heartbeat_time = now, lease_expires = {_lease("r.attempt_start")}
FROM free, clock WHERE r.place = free.place RETURNING lease_expires
"""
"""As in `attempts`: a row that another transaction has locked is skipped, because its attempt reports at this moment. Most
heartbeats come a moment after another sign of life, and cost only the query."""

APPEND = f"""
WITH {_CLOCK},
held AS MATERIALIZED (
    SELECT number, now, r.place, r.worker_id, given.append_id, coalesce(r.last_append_id = given.append_id, false) AS again,
        CASE WHEN {_IS_NEWS} THEN {_lease("r.attempt_start")} END AS lease, {_IS_NEWS} AS news
    FROM unnest($1::int[], $2::text[], $3::text[], $4::text[]) AS given (number, rollout_id, attempt_id, append_id)
    JOIN rollouts AS r ON r.rollout_id = given.rollout_id CROSS JOIN clock
    WHERE r.attempt_id = given.attempt_id AND {_ALIVE}
    FOR UPDATE OF r SKIP LOCKED
),
one AS MATERIALIZED (
    SELECT * FROM held WHERE number IN (SELECT min(number) FROM held GROUP BY place)
),
touched AS (
    UPDATE rollouts AS r SET
        status = '{RolloutStatus.RUNNING}', last_append_id = one.append_id,
        last_heartbeat_time = CASE WHEN news THEN now ELSE r.last_heartbeat_time END,
        lease_expires = CASE WHEN news THEN lease ELSE r.lease_expires END
    FROM one WHERE r.place = one.place AND NOT again
),
added AS (
    INSERT INTO journal (place, data)
    SELECT place, data FROM unnest($5::int[], $6::bytea[]) WITH ORDINALITY AS entry (call, data, position)
    JOIN one ON one.number = entry.call WHERE NOT again ORDER BY position
)
SELECT number, now, worker_id, lease FROM one
"""
"""One call for each rollout; a second one waits for the transaction behind. Leases that were extended a moment ago stay,
so that no index has to be written."""
