"""The tables of a SQL store, in both dialects. `migrations` makes them; a test holds the two together.

A rollout's row holds its current attempt too, so a claim, a heartbeat or a lookup touches one row; `attempts`
keeps those that have ended. `place`, a rollout's number in the order of arrival, joins the tables: small, and in
the order in which rows are written and read. There are no foreign keys: every change goes through the
operations of this package, which keep the tables in step, and each key would cost a lookup on the hot path.
The partial indexes hold only what is waiting, held or untold, so that claims and the health check cost the
same however many rollouts there are.
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
"""SQLite numbers rows by itself only in a column whose type is exactly INTEGER. It gives the number of a deleted last
row again, which does no harm: the last event is never deleted, and all that a rollout's number joins goes with it."""
_TEXT = String().with_variant(String(collation="C"), "postgresql")
"""Compared byte by byte in both dialects, whatever the language of the database."""

ATTEMPTS_OF_ONE = 2**20
"""More attempts than a rollout ever gets; leaves 43 bits for its place."""

WAITING = text("waiting = 1")
HELD = text("attempt_id IS NOT NULL")
CLAIMED = text("claim_id IS NOT NULL")
UNREPORTED = text("taken = 1")
"""Queries repeat these words exactly: only then does SQLite use the index."""


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
"""`waiting` follows from the status; it has a column of its own so that no other index suits a claim. The two
limits repeat what `config` says. The columns from `attempt_id` on are empty unless an attempt holds the rollout."""
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
"""`number`: `place * ATTEMPTS_OF_ONE + sequence_id`, so that a rollout's lie side by side, and the newest ones at the
end of the table, where SQLite adds a row without moving others. `taken`: 1 while the worker has not been told that the attempt was taken from it."""
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
"""SQLite only. For each start of the machine, what to add to its monotonic clock to get the store's time: so all
processes have the same time, and a jump of the system's clock does not reach the leases."""

counters = Table(
    "counters",
    metadata,
    Column("name", _TEXT, primary_key=True),
    Column("value", BigInteger, nullable=False),
)
"""`completions`: the last cursor given out. On PostgreSQL its row is locked until the end of the transaction that took
a cursor, so cursors become visible in their order and a reader never passes one that comes later. SQLite has one
transaction at a time, which counts on from the last completion; the row then only says which cursors were given to
rollouts that are deleted."""
