"""Fewer pages to write for a rollout that ends: attempts lie in the order of their numbers, and one index less.

The completion log tells which rollouts are final, so they need no index of their own.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")

KEPT = (
    "place, sequence_id, attempt_id, status, start_time, end_time, worker_id,"
    " last_heartbeat_time, lease_expires, reason, metadata, taken"
)


def upgrade() -> None:
    op.drop_index("rollouts_final", "rollouts")
    op.drop_index("attempts_taken", "attempts")
    if op.get_context().dialect.name == "postgresql":
        op.execute("ALTER TABLE attempts RENAME CONSTRAINT attempts_pkey TO attempts_0001_pkey")
    op.rename_table("attempts", "attempts_0001")
    op.create_table(
        "attempts",
        sa.Column("number", NUMBER, primary_key=True, autoincrement=False),
        sa.Column("place", NUMBER, nullable=False),
        sa.Column("sequence_id", sa.Integer, nullable=False),
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
    )
    op.execute(
        f"INSERT INTO attempts (number, {KEPT})"
        f" SELECT place * 1048576 + sequence_id, {KEPT} FROM attempts_0001 ORDER BY place, sequence_id"
    )
    op.drop_table("attempts_0001")
    condition = sa.text("taken = 1")
    op.create_index(
        "attempts_taken", "attempts", ["worker_id"], sqlite_where=condition, postgresql_where=condition
    )
