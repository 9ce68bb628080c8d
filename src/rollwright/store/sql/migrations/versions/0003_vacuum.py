"""PostgreSQL vacuums the tables of the queue after so many changes, whatever their size, and leaves room in their pages.

By default a table is vacuumed when a fifth of its rows has changed. In a large table of finished rollouts the few rows
that change all the time would leave behind dead versions of the whole queue until then. Room in a page lets a change of
unindexed columns, such as a journalled turn's, stay in it and write no index.
"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

EVERY = "autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 10000"
SETTINGS = {
    "rollouts": f"fillfactor = 80, {EVERY}",
    "attempts": EVERY,
    "trajectories": EVERY,
    "journal": EVERY,
    "completions": EVERY,
    "events": EVERY,
    "counters": "fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000",
    "workers": "fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000",
}


def upgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        for table, settings in SETTINGS.items():
            op.execute(f"ALTER TABLE {table} SET ({settings})")
