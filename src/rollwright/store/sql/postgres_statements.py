"""The SQL of `postgres_batches`: each statement serves many callers, and changes only rollouts for which nothing is special.

The time is the server's, read once by each statement. Rows are joined through their indexes whatever the planner knows
about the tables (`SETTINGS`): one generic plan serves two rows and a million.
"""

from rollwright.store.checks import EMPTY
from rollwright.store.records import AttemptStatus, EventKind, RolloutStatus
from rollwright.store.sql.rows import ROLLOUT_COLUMNS
from rollwright.store.sql.schema import ATTEMPTS_OF_ONE, CLAIMED, HELD, WAITING
from rollwright.store.sql.transaction import COMPLETIONS
from rollwright.store.transitions import ATTEMPT_CHANGES, SAME_MOMENT

SETTINGS = {
    "plan_cache_mode": "force_generic_plan",  # planning takes longer than executing
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_seqscan": "off",
    "jit": "off",
}
"""Of the connections that write: all their statements look rows up by index, also in tables that grew since the plan."""

GIVEN = (
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
WAITS = ("status", "waiting", "start_time", "tries", "attempts")
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
        $8::int[], $9::bytea[]) AS given ({", ".join(GIVEN)})
),
entered AS (
    INSERT INTO rollouts ({", ".join(GIVEN)}, {", ".join(WAITS)})
    SELECT given.*, '{RolloutStatus.QUEUING}', 1, now, 0, 0 FROM given, clock
    ON CONFLICT (rollout_id) DO NOTHING RETURNING start_time, rollout_id
),
logged AS (
    INSERT INTO events (time, kind, rollout_id)
    SELECT start_time, '{EventKind.ENQUEUED}', rollout_id FROM entered
)
SELECT start_time, rollout_id FROM entered
"""

_TAKE = f"""
        status = '{RolloutStatus.PREPARING}', waiting = 0, tries = tries + 1, attempts = attempts + 1,
        attempt_id = {{attempt}}::text || '.' || r.place, worker_id = {{worker}}, claim_id = {{claim}},
        attempt_start = now, last_heartbeat_time = now, lease_expires = {_lease("now")}, attempt_metadata = NULL"""

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
    UPDATE rollouts AS r SET {_TAKE.format(attempt="$4", worker="($2::text[])[number]", claim="($3::text[])[number]")}
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

_ENDED = "number, now, rollout_id, attempt_id, attempts, attempt_start, worker_id, lease_expires, metadata"


def _finish(also: str) -> str:
    """The parts of a statement that ends attempts as succeeded; `also`: a further condition for the attempts."""
    return f"""
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
        AND (given.worker_id IS NULL OR r.worker_id IS NULL OR r.worker_id = given.worker_id) {also}
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
)"""


FINISH = f"WITH {_CLOCK}, {_finish('')} SELECT {_ENDED} FROM ended"
"""The first of several equal reports is taken; the others are repetitions."""

FINISH_AND_CLAIM = f"""
WITH {_CLOCK},
block AS MATERIALIZED (
    SELECT coalesce((SELECT min(lease_expires) FROM rollouts WHERE {HELD}) <= now, false)
        OR EXISTS (SELECT FROM rollouts WHERE claim_id = ANY($6::text[]) AND {CLAIMED}) AS blocked
    FROM clock
),
{_finish("AND NOT (SELECT blocked FROM block)")},
free AS MATERIALIZED (
    SELECT place, priority FROM rollouts WHERE {WAITING}
    ORDER BY priority DESC, place LIMIT (SELECT count(*) FROM ended) FOR UPDATE SKIP LOCKED
),
numbered AS MATERIALIZED (
    SELECT place, row_number() OVER (ORDER BY priority DESC, place) AS turn FROM free
),
callers AS MATERIALIZED (
    SELECT number AS caller, row_number() OVER (ORDER BY number) AS turn FROM ended
),
taken AS (
    UPDATE rollouts AS r SET {_TAKE.format(attempt="$7", worker="($4::text[])[caller + 1]", claim="($6::text[])[caller + 1]")}
    FROM numbered JOIN callers USING (turn), clock WHERE r.place = numbered.place
    RETURNING caller, {_ROLLOUT}
),
claimed AS (
    INSERT INTO events (time, kind, rollout_id, attempt_id, worker_id, lease_expires)
    SELECT now, '{EventKind.CLAIMED}', rollout_id, attempt_id, worker_id, lease_expires FROM taken, clock
)
SELECT {", ".join(f"ended.{name}" for name in _ENDED.split(", "))}, taken.* FROM ended LEFT JOIN taken ON taken.caller = ended.number
"""
"""Ends attempts, and claims a rollout for each caller whose attempt it ended. Changes nothing while `CLAIM` would claim
nothing. The caller's number is its place in the arrays, from 0."""

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
