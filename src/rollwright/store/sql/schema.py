"""The tables of a SQL store, in both dialects. `migrations` creates them; a test compares the two.

A rollout's row also has its current attempt, so a claim, a heartbeat or a lookup touches one row; `attempts` has the
ended ones. `place`, a rollout's number in the order of arrival, joins the tables: it is small, and rows are written and
read in its order. There are no foreign keys: all changes go through the operations of this package, which keep the tables
consistent, and each key would cost a lookup on the hot path. The partial indexes cover only rows that are waiting, held
or unreported, so that claims and expiry checks cost the same for any number of rollouts.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    UniqueConstraint,
    text,
)

metadata = MetaData()

_NUMBER = BigInteger().with_variant(Integer, "sqlite")
"""SQLite numbers rows only in a column whose type is exactly INTEGER. It reuses the number of a deleted last row, which is
harmless: the last event is never deleted, and a rollout is deleted with all rows that its number joins."""
_TEXT = String().with_variant(String(collation="C"), "postgresql")
"""Compared byte by byte in both dialects, for any language of the database."""

ATTEMPTS_OF_ONE = 2**20
"""More attempts than a rollout ever has; leaves 43 bits for its place."""

WAITING = text("waiting = 1")
HELD = text("attempt_id IS NOT NULL")
CLAIMED = text("claim_id IS NOT NULL")
UNREPORTED = text("taken = 1")
"""Queries use exactly these texts: only then does SQLite use the partial index."""


def _where(condition: Any) -> dict[str, Any]:
    return {"sqlite_where": condition, "postgresql_where": condition}


rollouts = Table(
    "rollouts",
    metadata,
    Column("place", _NUMBER, primary_key=True, autoincrement=True),
    Column("rollout_id", _TEXT, nullable=False, unique=True),
    Column("status", _TEXT, nullable=False),
    Column("waiting", SmallInteger, nullable=False),
    Column("start_time", Double, nullable=False),
    Column("end_time", Double),
    Column("mode", _TEXT),
    Column("resources_id", _TEXT),
    Column("config", LargeBinary, nullable=False),
    Column("timeout_seconds", Double),
    Column("unresponsive_seconds", Double),
    Column("metadata", LargeBinary, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("attempt_id", _TEXT),
    Column("worker_id", _TEXT),
    Column("claim_id", _TEXT),
    Column("attempt_start", Double),
    Column("last_heartbeat_time", Double),
    Column("lease_expires", Double),
    Column("last_append_id", _TEXT),
    Column("attempt_metadata", LargeBinary),
    Column("input", LargeBinary, nullable=False),
)
"""`waiting` follows from the status; with a column of its own, no other index matches a claim. The two time limits repeat
values of `config`, for SQL. The columns from `attempt_id` to `attempt_metadata` are empty unless an attempt holds the
rollout."""
Index("rollouts_waiting", rollouts.c.priority.desc(), rollouts.c.place, **_where(WAITING))
Index("rollouts_lease", rollouts.c.lease_expires, **_where(HELD))
Index("rollouts_claim", rollouts.c.claim_id, **_where(CLAIMED))
Index("rollouts_worker", rollouts.c.worker_id, **_where(HELD))

attempts = Table(
    "attempts",
    metadata,
    Column("number", _NUMBER, primary_key=True, autoincrement=False),
    Column("place", _NUMBER, nullable=False),
    Column("sequence_id", Integer, nullable=False),
    Column("attempt_id", _TEXT, nullable=False),
    Column("status", _TEXT, nullable=False),
    Column("start_time", Double, nullable=False),
    Column("end_time", Double, nullable=False),
    Column("worker_id", _TEXT),
    Column("last_heartbeat_time", Double, nullable=False),
    Column("lease_expires", Double),
    Column("reason", _TEXT),
    Column("metadata", LargeBinary, nullable=False),
    Column("taken", SmallInteger, nullable=False),
)
"""`number` is `place * ATTEMPTS_OF_ONE + sequence_id`: the attempts of a rollout are adjacent, and the newest ones are at
the end of the table, where SQLite appends a row without moving others. `taken` is 1 while the worker has not been notified
that it lost the attempt."""
Index("attempts_taken", attempts.c.worker_id, **_where(UNREPORTED))

trajectories = Table(
    "trajectories",
    metadata,
    Column("place", _NUMBER, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)

journal = Table(
    "journal",
    metadata,
    Column("position", _NUMBER, primary_key=True, autoincrement=True),
    Column("place", _NUMBER, nullable=False, index=True),
    Column("data", LargeBinary, nullable=False),
)

completions = Table(
    "completions",
    metadata,
    Column("cursor", _NUMBER, primary_key=True, autoincrement=False),
    Column("place", _NUMBER, nullable=False),
    Column("rollout_id", _TEXT, nullable=False),
    Column("attempt_id", _TEXT),
    Column("status", _TEXT, nullable=False),
    Column("reason", _TEXT),
    Column("end_time", Double, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("sequence", _NUMBER, primary_key=True, autoincrement=True),
    Column("time", Double, nullable=False),
    Column("kind", _TEXT, nullable=False),
    Column("rollout_id", _TEXT, nullable=False),
    Column("attempt_id", _TEXT),
    Column("worker_id", _TEXT),
    Column("status", _TEXT),
    Column("lease_expires", Double),
    Column("becomes", _TEXT),
)

workers = Table(
    "workers",
    metadata,
    Column("worker_id", _TEXT, primary_key=True),
    Column("heartbeat_stats", LargeBinary, nullable=False),
    Column("last_heartbeat_time", Double, nullable=False),
    Column("last_dequeue_time", Double),
    Column("last_busy_time", Double),
    Column("last_idle_time", Double),
)

resources = Table(
    "resources",
    metadata,
    Column("change", _NUMBER, primary_key=True, autoincrement=True),
    Column("resources_id", _TEXT, nullable=False),
    Column("version", Integer, nullable=False),
    Column("create_time", Double, nullable=False),
    Column("update_time", Double, nullable=False),
    Column("data", LargeBinary, nullable=False),
    UniqueConstraint("resources_id", "version"),
)

clocks = Table(
    "clocks",
    metadata,
    Column("boot_id", _TEXT, primary_key=True),
    Column("offset", Double, nullable=False),
)
"""SQLite only. For each boot of the machine, the offset from its monotonic clock to the store's time: so all processes
have the same time, and a jump of the system's clock does not affect leases."""

counters = Table(
    "counters",
    metadata,
    Column("name", _TEXT, primary_key=True),
    Column("value", BigInteger, nullable=False),
)
"""`completions`: the last cursor that was assigned. On PostgreSQL a transaction that takes a cursor locks the row until its
end, so cursors become visible in their order and a reader never skips one. SQLite has one write transaction at a time,
which counts on from the last completion; there the row only keeps the cursors of deleted rollouts from being reused."""
