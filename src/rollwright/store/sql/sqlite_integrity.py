"""Whether a SQLite file is sound, asked without changing it: nothing is repaired, and its log is not copied into it.

A file passes if SQLite finds its structure whole and a store's tables in it. Bytes that were changed inside a value
leave the structure whole; what a run keeps there (trajectories, turns) has checksums of its own.

What can still be read of a damaged SQLite file, after it was moved aside.

By connections of its own, apart from any store that has the file open: reading a damaged file must not be able to hold up
anybody else.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

from rollwright.store.sql.migrate import NEWEST, READ_VERSION, VERSION_TABLE
from rollwright.store.sql.schema import metadata

THOROUGH_BYTES = 64 * 2**20
"""Up to this size every index is compared with its table, half a second's work; of larger files only the pages and rows
themselves are looked at, at several times the speed."""

_BUSY_SECONDS = 30.0
"""How long to wait for a process that has the file locked while it recovers the log: that takes milliseconds."""
_STORE_TABLES = 3
"""Of the tables that every store has had since the first release, those that are looked for."""
_SHOWN = 20
"""Problems told of one file; damage to a page near the root brings one for every page below it."""


def check_integrity(path: Path, *, full: bool | None = None) -> list[str]:
    """The problems of the file, one line each that begins with its name; empty if it is sound.

    `full` also compares every index with its table, which reads the whole file; without it the time is that of reading
    the pages in order; `None`: where the file is small enough. Other processes may have the file open; one that keeps it
    locked is at work on it, and would notice damage itself.
    """
    if not path.is_file():
        return [f"{path}: there is no such file"]
    try:
        full = path.stat().st_size <= THOROUGH_BYTES if full is None else full
        with closing(_connect(path)) as connection:
            check = "integrity_check" if full else "quick_check"
            rows = connection.execute(f"PRAGMA {check}({_SHOWN})").fetchall()
            known = connection.execute(
                "SELECT count(*) FROM sqlite_master WHERE name IN ('rollouts', 'completions', ?)",
                [VERSION_TABLE],
            ).fetchone()[0]
            if (
                known == _STORE_TABLES and _version(connection) == NEWEST
            ):  # an older one gets its columns when opened
                _find_columns(connection)
    except sqlite3.OperationalError as error:
        locked = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        return [] if locked else [f"{path}: {one_line(error)}"]
    except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
        return [f"{path}: {one_line(error)}"]
    said = [line for [text] in rows for line in text.splitlines() if line != "ok" and line[:3] != "***"]
    problems = [f"{path}: {line}" for line in said[:_SHOWN]]
    if not problems and known < _STORE_TABLES:
        problems = [f"{path}: it has none of a store's tables; its log {path.name}-wal may be missing"]
    return problems


def one_line(problem: object) -> str:
    return " ".join(str(problem).split())


def _version(connection: sqlite3.Connection) -> str | None:
    found = connection.execute(READ_VERSION).fetchone()
    return None if found is None else str(found[0])


def _find_columns(connection: sqlite3.Connection) -> None:
    """Damage can change the name of a table or a column; then it is not found."""
    for table in metadata.sorted_tables:
        columns = ", ".join(f'found."{column.name}"' for column in table.columns)
        connection.execute(f'SELECT {columns} FROM "{table.name}" AS found LIMIT 0')


def _connect(path: Path) -> sqlite3.Connection:
    """Read-only: such a connection does not copy the log into the file when it is closed."""
    address = f"file:{quote(str(path.absolute()))}?mode=ro"
    connection = sqlite3.connect(address, uri=True, timeout=_BUSY_SECONDS)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        if path.with_name(f"{path.name}-wal").exists():
            raise
        # In a folder that cannot be written SQLite cannot make the log's index, and without a log it needs none.
        connection = sqlite3.connect(f"{address}&immutable=1", uri=True)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


_MOST_PLACES = 10_000_000
"""A damaged number must not keep anybody looking for ever."""


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
        with suppress(sqlite3.Error):
            # A table whose description is damaged then does not make the others unreadable.
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
