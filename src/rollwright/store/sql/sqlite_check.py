"""Whether a SQLite file is whole, and what can still be read of one that is not.

By connections of its own, apart from any store that has the file open: looking at a damaged file must not be able to
hold up anybody else.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from rollwright.store.sql.migrate import NEWEST, READ_VERSION, VERSION_TABLE
from rollwright.store.sql.schema import metadata

THOROUGH_BYTES = 64 * 2**20
"""Up to this size every index is compared with its table, half a second's work; of larger files only the pages and rows
themselves are looked at, at several times the speed."""


MISSING = "there is no such file"


def complaint(path: Path) -> str | None:
    """What is wrong with the file; `None`: nothing that can be found."""
    if not path.is_file():
        return MISSING
    try:
        check = "integrity_check" if path.stat().st_size <= THOROUGH_BYTES else "quick_check"
        with closing(sqlite3.connect(path)) as connection:
            [found] = connection.execute(f"PRAGMA {check}(1)").fetchone()
            if _version(connection) == NEWEST:  # an older one gets its columns when it is opened
                _find_columns(connection)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return None  # others are at work on it, and would have noticed
        return str(error)
    except (sqlite3.Error, UnicodeError) as error:
        return str(error)
    return None if found == "ok" else " ".join(str(found).split())


def _find_columns(connection: sqlite3.Connection) -> None:
    """Damage can change the name of a table or a column; then it is not found."""
    for table in metadata.sorted_tables:
        columns = ", ".join(f'found."{column.name}"' for column in table.columns)
        connection.execute(f'SELECT {columns} FROM "{table.name}" AS found LIMIT 0')


def _version(connection: sqlite3.Connection) -> str | None:
    known = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    if not connection.execute(known, [VERSION_TABLE]).fetchone():
        return None
    found = connection.execute(READ_VERSION).fetchone()
    return None if found is None else str(found[0])


def move_aside(path: Path) -> Path:
    """Gives a damaged file and its write-ahead log another name; gives that."""
    aside, number = path.with_name(f"{path.name}.damaged"), 2
    while aside.exists():
        aside = path.with_name(f"{path.name}.damaged-{number}")
        number += 1
    for suffix in ("-wal", "-shm", ""):
        if (old := path.with_name(path.name + suffix)).exists():
            old.replace(aside.with_name(aside.name + suffix))
    return aside


def readable_trajectories(path: Path) -> Iterator[bytes]:
    """What can still be read of the trajectories in a damaged file, one by one."""
    with closing(sqlite3.connect(path)) as connection:
        with suppress(
            sqlite3.Error
        ):  # a table whose description is damaged does not make the others unreadable
            connection.execute("PRAGMA writable_schema=ON")
        for place in range(1, _last_place(connection) + 1):
            try:
                row = connection.execute("SELECT data FROM trajectories WHERE place = ?", [place]).fetchone()
            except (sqlite3.Error, UnicodeError):
                continue
            if row is not None and isinstance(row[0], bytes):
                yield row[0]


def _last_place(connection: sqlite3.Connection) -> int:
    """0: not even that can be read."""
    for table in ("trajectories", "rollouts", "completions"):
        try:
            [place] = connection.execute(f"SELECT max(place) FROM {table}").fetchone()
        except (sqlite3.Error, UnicodeError):
            continue
        if isinstance(place, int):
            return min(place, _MOST_PLACES)
    return 0


_MOST_PLACES = 10_000_000
"""A damaged number must not keep anybody looking for ever."""
