"""Opening a SQLite file: its tables are made or brought up to date, its clock is found, its log is laid out.

A flush to disk costs twice as much, and waits for the file system's own journal, where it makes a file longer. So
the write-ahead log has its full length before the first call, and checkpoints start it again from its beginning.
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
"""How long to wait for another process's lock. Its transactions take milliseconds."""

_CACHED_STATEMENTS = 256
"""More than the store has, so that none is prepared twice."""
_CACHE_KIB = 65536
"""Keeps the hot pages of some 100,000 rollouts in memory."""
CHECKPOINT_PAGES = 7500
"""Of the write-ahead log (30 MB) before they are copied into the file: a page that changes with every call is copied
once for all of them, and all wait until the file is flushed, for milliseconds. Opening the file after a crash reads as
much, in milliseconds."""
LOG_BYTES = 36 * 2**20
"""Of the log from the beginning: as much as it holds at a checkpoint, and room for what is committed until then."""
_ZEROS = bytes(2**16)
"""The log is laid out in pieces of this size. The kernel caches a file in folios as large as the writes that made it, and
goes through all blocks of a folio for each small write into it: with pieces of a MiB a commit takes half as long again."""
_OLDEST_SQLITE = (3, 35)
"""The first with `RETURNING`."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Linux names each start of the machine here."""


Clock = Callable[[], float]


def open_file(path: Path, clock: Clock | None) -> tuple[Clock, sqlite3.Connection, sqlite3.Connection]:
    """The file's clock, unless another one is given, and a connection to write and one to read with."""
    with _opening(path), ExitStack() as undo:
        own = prepare(path)
        writer, reader = (undo.enter_context(closing(connect(path, clock or own))) for _ in range(2))
        lay_out_log(path, writer)
        writer.execute(
            "PRAGMA busy_timeout=0"
        )  # it asks again by itself, at shorter intervals than SQLite does
        reader.execute("SELECT count(*) FROM sqlite_master").fetchone()
        undo.pop_all()
    return clock or own, writer, reader


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Whatever a damaged file leads to is told in one line."""
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
    """Raises if the path is no longer that of the file that was opened."""
    try:
        found = file_identity(path)
    except OSError as error:
        raise StoreUnavailable(
            f"{path} was removed while it was open, or is out of reach: {error}"
        ) from error
    if found != opened:
        raise StoreUnavailable(f"{path} was replaced while it was open; open it again")


def connect(path: Path, clock: Clock) -> sqlite3.Connection:
    """For one thread at a time, but not for always the same."""
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
        "secure_delete=OFF",  # some builds of SQLite overwrite whatever is deleted, such as each index entry
    ):
        connection.execute(f"PRAGMA {setting}")
    connection.create_function("store_now", 0, clock)


def prepare(path: Path) -> Clock:
    """Makes the file ready for use; returns its clock."""
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old: the store needs 3.35 or newer")
    with _opening(path), closing(connect(path, time.time)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        for step in _statements(missing_steps(Dialect.SQLITE, _version(connection), str(path))):
            connection.execute(step)
        clock = _clock(connection)
        connection.execute("COMMIT")
    return clock


def lay_out_log(path: Path, connection: sqlite3.Connection) -> None:
    """Gives the write-ahead log its full length on disk.

    Behind what it holds come zeros, which SQLite takes for the end of the log. They are written under the write lock:
    nobody else can make the log longer meanwhile, and nobody deletes it while this connection has it open.
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
    """The monotonic clock, shifted so that it was right when the file was first opened since the machine
    started. So all processes have the same time, and it never jumps."""
    offset = time.time() - time.monotonic()
    if _BOOT_ID.exists():
        boot_id = _BOOT_ID.read_text().strip()
        connection.execute(
            'INSERT OR IGNORE INTO clocks (boot_id, "offset") VALUES (?, ?)', [boot_id, offset]
        )
        [offset] = connection.execute('SELECT "offset" FROM clocks WHERE boot_id = ?', [boot_id]).fetchone()
    return lambda: offset + time.monotonic()
