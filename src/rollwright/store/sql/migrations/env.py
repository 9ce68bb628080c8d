"""Alembic's entry: renders migrations as SQL, for `rollwright.store.sql.migrate` to run."""

from alembic import context

from rollwright.store.sql.schema import metadata

context.configure(
    dialect_name=context.config.attributes["dialect"],
    target_metadata=metadata,
    version_table=context.config.attributes["version_table"],
    transactional_ddl=False,
)
context.run_migrations()
