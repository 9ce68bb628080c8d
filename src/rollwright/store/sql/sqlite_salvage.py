"""What can still be read of a damaged SQLite file, after it was moved aside.

By connections of its own, apart from any store that has the file open: reading a damaged file must not be able to hold up
anybody else.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

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
