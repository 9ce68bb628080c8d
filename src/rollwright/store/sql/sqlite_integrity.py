"""Checks a SQLite file for damage without changing it, and reads trajectories from a damaged one.

A file passes if SQLite finds its structure intact and the store's tables in it; nothing is repaired, and the log is not
copied into the file. Bytes that changed inside a value leave the structure intact; trajectories and turns have checksums
of their own.

All reads use connections of their own: a damaged file must not block a store that has it open.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

from rollwright.store.sql.migrate import NEWEST, READ_VERSION, VERSION_TABLE
from rollwright.store.sql.rows import ROLLOUT_COLUMNS, RolloutRow
from rollwright.store.sql.schema import metadata
from rollwright.store.transitions import FINAL_ROLLOUT

THOROUGH_BYTES = 64 * 2**20
"""Up to this size every index is compared with its table, which takes half a second; of larger files only the pages and
rows are read, several times as fast."""

_BUSY_SECONDS = 30.0
"""Time limit for another process that has the file locked while it recovers the log, which takes milliseconds."""
_STORE_TABLES = 3
"""Number of tables that the check looks for; every store has had them since the first release."""
_SHOWN = 20
"""Most problems reported for one file; damage to a page near the root causes one for every page below it."""


def check_integrity(path: Path, *, full: bool | None = None) -> list[str]:
    """The problems of the file, one line each that begins with its path; empty if it is intact.

    `full` also compares every index with its table, which reads the whole file; `None`: only if the file is small. Other
    processes may have the file open; one that keeps it locked is using it, and would find damage itself.
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
            # A file with an older schema gets its missing columns when it is opened.
            if known == _STORE_TABLES and _version(connection) == NEWEST:
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


def decode_rollouts(path: Path) -> list[str]:
    """Decodes every rollout of a file with the newest schema, one by one; raises whatever damaged bytes lead to. Returns the
    ids of those that have not ended."""
    found: list[str] = []
    columns = ", ".join(f'"{each.name}"' for each in ROLLOUT_COLUMNS)
    with closing(_connect(path)) as connection:
        for row in connection.execute(f"SELECT {columns} FROM rollouts"):
            rollout = RolloutRow(*row).record()
            if rollout.status not in FINAL_ROLLOUT:
                found.append(rollout.rollout_id)
    return found


def one_line(problem: object) -> str:
    return " ".join(str(problem).split())


def _version(connection: sqlite3.Connection) -> str | None:
    found = connection.execute(READ_VERSION).fetchone()
    return None if found is None else str(found[0])


def _find_columns(connection: sqlite3.Connection) -> None:
    """Fails if a table or a column is missing, because damage can change their names."""
    for table in metadata.sorted_tables:
        columns = ", ".join(f'found."{column.name}"' for column in table.columns)
        connection.execute(f'SELECT {columns} FROM "{table.name}" AS found LIMIT 0')


def _connect(path: Path) -> sqlite3.Connection:
    """A read-only connection, which does not copy the log into the file when it is closed."""
    address = f"file:{quote(str(path.absolute()))}?mode=ro"
    connection = sqlite3.connect(address, uri=True, timeout=_BUSY_SECONDS)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        if path.with_name(f"{path.name}-wal").exists():
            raise
        # In a read-only folder SQLite cannot create the index of the log, and without a log it needs none.
        connection = sqlite3.connect(f"{address}&immutable=1", uri=True)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


_MOST_PLACES = 10_000_000
"""Upper limit of the search, in case the largest number itself is damaged."""


def move_aside(path: Path) -> Path:
    """Renames a damaged file and its write-ahead log; returns the new path."""
    aside, number = path.with_name(f"{path.name}.damaged"), 2
    while aside.exists():
        aside = path.with_name(f"{path.name}.damaged-{number}")
        number += 1
    for suffix in ("-wal", "-shm", ""):
        if (old := path.with_name(path.name + suffix)).exists():
            old.replace(aside.with_name(aside.name + suffix))
    return aside


def readable_trajectories(path: Path) -> Iterator[bytes]:
    """The trajectories of a damaged file that can still be read, one by one."""
    with closing(sqlite3.connect(path)) as connection:
        with suppress(sqlite3.Error):
            # Else one table with a damaged definition makes all others unreadable.
            connection.execute("PRAGMA writable_schema=ON")
        for place in range(1, _last_place(connection) + 1):
            try:
                row = connection.execute("SELECT data FROM trajectories WHERE place = ?", [place]).fetchone()
            except (sqlite3.Error, UnicodeError):
                continue
            if row is not None and isinstance(row[0], bytes):
                yield row[0]


def _last_place(connection: sqlite3.Connection) -> int:
    """The largest place of any rollout; 0 if it cannot be read."""
    for table in ("trajectories", "rollouts", "completions"):
        try:
            [place] = connection.execute(f"SELECT max(place) FROM {table}").fetchone()
        except (sqlite3.Error, UnicodeError):
            continue
        if isinstance(place, int):
            return min(place, _MOST_PLACES)
    return 0
