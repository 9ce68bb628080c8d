"""Opens a SQLite file: creates or migrates its tables, reads its clock, preallocates its write-ahead log.

A flush that extends a file costs twice as much, and waits for the file system's own journal. So the write-ahead log has
its full length before the first call, and each checkpoint restarts it from its beginning.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from rollwright.errors import RollwrightError
from rollwright.store.errors import StoreError, StoreUnavailable
from rollwright.store.sql.migrate import READ_VERSION, VERSION_TABLE, missing_steps
from rollwright.store.sql.sqlite_integrity import one_line
from rollwright.store.sql.statements import Dialect

BUSY_SECONDS = 30.0
"""Time limit for another process's lock. Transactions take milliseconds."""

_CACHED_STATEMENTS = 256
"""More statements than the store has, so that none is prepared twice."""
_CACHE_KIB = 65536
"""Enough for the hot pages of some 100,000 rollouts."""
CHECKPOINT_PAGES = 7500
"""Length of the write-ahead log (30 MB) at which it is copied into the file. A page that changes with every call is copied
once for all of them. All calls wait for the checkpoint, some milliseconds; opening the file after a crash reads as much,
in milliseconds."""
LOG_BYTES = 36 * 2**20
"""Preallocated length of the log: that of a checkpoint, and room for the commits until the checkpoint runs."""
_ZEROS = bytes(2**16)
"""One write of the preallocation. The kernel caches a file in folios as large as the writes that created it, and visits
all blocks of a folio for each small write into it: with writes of 1 MiB a commit takes half as long again."""
_OLDEST_SQLITE = (3, 35)
"""The first version with `RETURNING`."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Linux: an id of the current boot."""


Clock = Callable[[], float]


def open_file(path: Path, clock: Clock | None) -> tuple[Clock, sqlite3.Connection, sqlite3.Connection]:
    """Returns the clock (the file's own unless one is given), a connection for writes and one for reads."""
    with _opening(path), ExitStack() as undo:
        own = prepare(path)
        writer, reader = (undo.enter_context(closing(connect(path, clock or own))) for _ in range(2))
        preallocate_log(path, writer)
        writer.execute("PRAGMA busy_timeout=0")  # the writer retries itself, at shorter intervals than SQLite
        reader.execute("SELECT count(*) FROM sqlite_master").fetchone()
        undo.pop_all()
    return clock or own, writer, reader


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Turns any error that a damaged file causes into one line."""
    try:
        yield
    except RollwrightError:
        raise
    except Exception as error:
        raise StoreError(f"{path} cannot be opened as a store: {one_line(error)}") from error


def file_identity(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def check_file(path: Path, opened: tuple[int, int]) -> None:
    """Raises if the path no longer names the file that was opened."""
    try:
        found = file_identity(path)
    except OSError as error:
        raise StoreUnavailable(
            f"{path} was removed while it was open, or is out of reach: {error}"
        ) from error
    if found != opened:
        raise StoreUnavailable(f"{path} was replaced while it was open; open it again")


def connect(path: Path, clock: Clock) -> sqlite3.Connection:
    """A connection that any thread may use, one at a time."""
    connection = sqlite3.connect(
        path,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_CACHED_STATEMENTS,
    )
    try:
        _set_up(connection, clock)
    except Exception:
        connection.close()
        raise
    return connection


def _set_up(connection: sqlite3.Connection, clock: Clock) -> None:
    for setting in (
        "journal_mode=WAL",
        "synchronous=FULL",
        f"wal_autocheckpoint={CHECKPOINT_PAGES}",
        f"cache_size=-{_CACHE_KIB}",
        "secure_delete=OFF",  # some builds of SQLite overwrite deleted content by default, such as each index entry
    ):
        connection.execute(f"PRAGMA {setting}")
    connection.create_function("store_now", 0, clock)


def prepare(path: Path) -> Clock:
    """Creates or migrates the tables; returns the file's clock."""
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old: the store needs 3.35 or newer")
    with _opening(path), closing(connect(path, time.time)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        for step in _statements(missing_steps(Dialect.SQLITE, _version(connection), str(path))):
            connection.execute(step)
        clock = _clock(connection)
        connection.execute("COMMIT")
    return clock


def preallocate_log(path: Path, connection: sqlite3.Connection) -> None:
    """Extends the write-ahead log to its full length with zeros, which SQLite reads as the end of the log.

    Under the write lock: no other process can append to the log meanwhile, or delete it while this connection is open.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        with path.with_name(f"{path.name}-wal").open("r+b", buffering=0) as log:
            length = log.seek(0, os.SEEK_END)
            if length >= LOG_BYTES:
                return
            while length < LOG_BYTES:
                length += log.write(_ZEROS[: LOG_BYTES - length])
            os.fsync(log.fileno())
    finally:
        connection.execute("ROLLBACK")


def _version(connection: sqlite3.Connection) -> str | None:
    known = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    if not connection.execute(known, [VERSION_TABLE]).fetchone():
        return None
    [version] = connection.execute(READ_VERSION).fetchone()
    return str(version)


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _clock(connection: sqlite3.Connection) -> Clock:
    """The monotonic clock plus an offset that the first process to open the file since the boot has stored. So all
    processes have the same time, and it never jumps."""
    offset = time.time() - time.monotonic()
    if _BOOT_ID.exists():
        boot_id = _BOOT_ID.read_text().strip()
        connection.execute(
            'INSERT OR IGNORE INTO clocks (boot_id, "offset") VALUES (?, ?)', [boot_id, offset]
        )
        [offset] = connection.execute('SELECT "offset" FROM clocks WHERE boot_id = ?', [boot_id]).fetchone()
    return lambda: offset + time.monotonic()
