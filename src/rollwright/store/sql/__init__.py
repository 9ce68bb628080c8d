"""The store in a SQL database: a SQLite file, or PostgreSQL when several machines share it."""

from rollwright.store.sql.store import SqlStore

__all__ = ["SqlStore"]
