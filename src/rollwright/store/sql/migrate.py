"""Migrates a database to the newest schema when it is opened.

Alembic renders the missing steps as SQL, and the driver runs them in one transaction under a lock, so several processes,
or several threads of one, may open a new database at once. A database of a newer release is rejected.
"""

import threading
from functools import cache
from io import StringIO

from rollwright.store.errors import StoreError
from rollwright.store.sql.statements import Dialect

VERSION_TABLE = "rollwright_schema"
"""Not alembic's default name: the database may have tables of another program that uses alembic."""

READ_VERSION = f"SELECT version_num FROM {VERSION_TABLE}"

NEWEST = "0003"
"""The last step in `migrations`. A constant, so that opening a current database does not import alembic."""

_alembic = threading.Lock()
"""Alembic keeps its state in module variables, so only one thread may use it at a time."""


def missing_steps(dialect: Dialect, version: str | None, where: str) -> str:
    """The SQL that leads from `version` (`None`: an empty database) to the newest schema."""
    if version == NEWEST:
        return ""
    with _alembic:
        if version is not None and version not in _known():
            raise StoreError(
                f"{where} has schema {version}, which this release does not know (it knows up to {NEWEST});"
                " open it with a newer release"
            )
        return _render(dialect, version)


@cache
def _known() -> frozenset[str]:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", _FOLDER)
    return frozenset(step.revision for step in ScriptDirectory.from_config(config).walk_revisions())


@cache
def _render(dialect: Dialect, version: str | None) -> str:
    from alembic import command
    from alembic.config import Config

    script = StringIO()
    config = Config(output_buffer=script)
    config.set_main_option("script_location", _FOLDER)
    config.attributes["dialect"] = str(dialect)
    config.attributes["version_table"] = VERSION_TABLE
    command.upgrade(config, f"{version or 'base'}:head", sql=True)
    return script.getvalue()


_FOLDER = "rollwright.store.sql:migrations"
