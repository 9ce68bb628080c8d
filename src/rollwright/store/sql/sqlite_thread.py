"""A SQLite connection, the thread that may block on it, and how operations run on it.

True of it: what is put into a thread is run in that order, and all of it before the connection is closed. The thread
ends only when it is stopped: whatever goes wrong is told to those whose work it was.
"""

import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from rollwright.errors import RollwrightError
from rollwright.store.errors import StoreDamaged, StoreError, StoreUnavailable
from rollwright.store.sql.sqlite_integrity import one_line
from rollwright.store.sql.statements import Operation

Result = TypeVar("Result")
Failed = Callable[[BaseException], None]

_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_ERROR)
"""A as_store_error `SQLITE_ERROR` is a table or a column that is missing: the statements themselves are right."""


def drive(cursor: sqlite3.Cursor, operation: Operation[Result]) -> Result:
    """Runs an operation to its end."""
    try:
        statement, values = next(operation)
        while True:
            compiled = statement.sqlite
            rows: list[Any] = []
            if compiled.returns_rows:
                for each in compiled.arguments(values):
                    found = cursor.execute(compiled.sql, each).fetchall()
                    rows = rows + found if rows else found
            else:
                cursor.executemany(compiled.sql, compiled.arguments(values))
            statement, values = operation.send(rows)
    except StopIteration as stop:
        result: Result = stop.value
        return result


class ConnectionThread:
    """Takes over the connection; `stop` closes it."""

    def __init__(self, name: str, connection: sqlite3.Connection) -> None:
        self._work: SimpleQueue[tuple[Callable[[], None], Failed] | None] = SimpleQueue()
        self._connection = connection
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None], failed: Failed) -> None:
        """`failed` is called in the thread with what `work` raises, and tells those who wait for it."""
        self._work.put((work, failed))

    def stop(self) -> None:
        """Returns when all that was put in is done."""
        self._work.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while given := self._work.get():
            work, failed = given
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - a thread that ended would leave its callers waiting
                with suppress(Exception):  # a loop that is gone has nobody left to tell
                    failed(error)
        with suppress(sqlite3.Error):  # nobody waits for it any more
            self._connection.close()


def as_store_error(error: BaseException, path: Path) -> Exception:
    """What the caller is told: one line that names the file, unless it is a refusal of the store's own."""
    told = _told(error, path)
    if told is not error:
        told.__cause__ = error
    return told


def _told(error: BaseException, path: Path) -> Exception:
    if isinstance(error, StoreDamaged) and str(path) not in str(error):
        return StoreDamaged(f"{path} is damaged: {error}")
    if isinstance(error, RollwrightError):
        return error
    if isinstance(error, UnicodeEncodeError):  # half a character
        return StoreError(f"a text that cannot be stored: {error}")
    if isinstance(error, OverflowError | sqlite3.ProgrammingError | sqlite3.InterfaceError):
        return StoreError(f"{path}: a value that cannot be stored: {one_line(error)}")
    if isinstance(error, sqlite3.Error):
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _DAMAGE:
            return StoreDamaged(f"{path} is damaged: {one_line(error)}")
        return StoreUnavailable(f"{path}: {one_line(error)}")
    if isinstance(error, OSError | MemoryError):
        return StoreUnavailable(f"{path}: {one_line(error) or type(error).__name__}")
    return StoreDamaged(f"{path} holds what cannot be read: {type(error).__name__}: {one_line(error)}")
