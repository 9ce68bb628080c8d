"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "rollouts",
        sa.Column("place", NUMBER, primary_key=True, autoincrement=True),
        sa.Column("rollout_id", TEXT, nullable=False, unique=True),
        sa.Column("status", TEXT, nullable=False),
        sa.Column("waiting", sa.SmallInteger, nullable=False),
        sa.Column("start_time", sa.Double, nullable=False),
        sa.Column("end_time", sa.Double),
        sa.Column("mode", TEXT),
        sa.Column("resources_id", TEXT),
        sa.Column("config", sa.LargeBinary, nullable=False),
        sa.Column("timeout_seconds", sa.Double),
        sa.Column("unresponsive_seconds", sa.Double),
        sa.Column("metadata", sa.LargeBinary, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("attempt_id", TEXT),
        sa.Column("worker_id", TEXT),
        sa.Column("claim_id", TEXT),
        sa.Column("attempt_start", sa.Double),
        sa.Column("last_heartbeat_time", sa.Double),
        sa.Column("lease_expires", sa.Double),
        sa.Column("last_append_id", TEXT),
        sa.Column("attempt_metadata", sa.LargeBinary),
        sa.Column("input", sa.LargeBinary, nullable=False),
    )
    _index("rollouts_waiting", "rollouts", [sa.text("priority DESC"), "place"], "waiting = 1")
    _index("rollouts_final", "rollouts", ["status"], "end_time IS NOT NULL")
    _index("rollouts_lease", "rollouts", ["lease_expires"], "attempt_id IS NOT NULL")
    _index("rollouts_claim", "rollouts", ["claim_id"], "claim_id IS NOT NULL")
    _index("rollouts_worker", "rollouts", ["worker_id"], "attempt_id IS NOT NULL")
    op.create_table(
        "attempts",
        sa.Column("place", NUMBER, primary_key=True, autoincrement=False),
        sa.Column("sequence_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("attempt_id", TEXT, nullable=False),
        sa.Column("status", TEXT, nullable=False),
        sa.Column("start_time", sa.Double, nullable=False),
        sa.Column("end_time", sa.Double, nullable=False),
        sa.Column("worker_id", TEXT),
        sa.Column("last_heartbeat_time", sa.Double, nullable=False),
        sa.Column("lease_expires", sa.Double),
        sa.Column("reason", TEXT),
        sa.Column("metadata", sa.LargeBinary, nullable=False),
        sa.Column("taken", sa.SmallInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    _index("attempts_taken", "attempts", ["worker_id"], "taken = 1")
    op.create_table(
        "trajectories",
        sa.Column("place", NUMBER, primary_key=True, autoincrement=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "journal",
        sa.Column("position", NUMBER, primary_key=True, autoincrement=True),
        sa.Column("place", NUMBER, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_journal_place", "journal", ["place"])
    op.create_table(
        "completions",
        sa.Column("cursor", NUMBER, primary_key=True, autoincrement=False),
        sa.Column("place", NUMBER, nullable=False),
        sa.Column("rollout_id", TEXT, nullable=False),
        sa.Column("attempt_id", TEXT),
        sa.Column("status", TEXT, nullable=False),
        sa.Column("reason", TEXT),
        sa.Column("end_time", sa.Double, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("sequence", NUMBER, primary_key=True, autoincrement=True),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("rollout_id", TEXT, nullable=False),
        sa.Column("attempt_id", TEXT),
        sa.Column("worker_id", TEXT),
        sa.Column("status", TEXT),
        sa.Column("lease_expires", sa.Double),
        sa.Column("becomes", TEXT),
    )
    op.create_table(
        "workers",
        sa.Column("worker_id", TEXT, primary_key=True),
        sa.Column("heartbeat_stats", sa.LargeBinary, nullable=False),
        sa.Column("last_heartbeat_time", sa.Double, nullable=False),
        sa.Column("last_dequeue_time", sa.Double),
        sa.Column("last_busy_time", sa.Double),
        sa.Column("last_idle_time", sa.Double),
    )
    op.create_table(
        "resources",
        sa.Column("change", NUMBER, primary_key=True, autoincrement=True),
        sa.Column("resources_id", TEXT, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("create_time", sa.Double, nullable=False),
        sa.Column("update_time", sa.Double, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("resources_id", "version"),
    )
    op.create_table(
        "clocks",
        sa.Column("boot_id", TEXT, primary_key=True),
        sa.Column("offset", sa.Double, nullable=False),
    )
    counters = op.create_table(
        "counters",
        sa.Column("name", TEXT, primary_key=True),
        sa.Column("value", sa.BigInteger, nullable=False),
    )
    op.bulk_insert(counters, [{"name": "completions", "value": 0}])
    if op.get_context().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION store_now() RETURNS double precision LANGUAGE sql VOLATILE"
            " AS 'SELECT extract(epoch FROM clock_timestamp())::double precision'"
        )


def _index(name: str, table: str, columns: list[sa.TextClause | str], where: str) -> None:
    condition = sa.text(where)
    op.create_index(name, table, columns, sqlite_where=condition, postgresql_where=condition)
