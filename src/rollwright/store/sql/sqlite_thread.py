"""A thread that owns a SQLite connection, the execution of operations on it, and the translation of its errors.

Work runs in the order in which it was put into the thread, all of it before the connection is closed. The thread ends
only when it is stopped: an exception is passed to the callback of the work that raised it.
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
"""A bare `SQLITE_ERROR` means a missing table or column: the statements themselves are correct."""


def drive(cursor: sqlite3.Cursor, operation: Operation[Result]) -> Result:
    """Runs an operation to its end: executes each statement that it yields, and sends it the rows."""
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
    """Owns the connection; `stop` closes it."""

    def __init__(self, name: str, connection: sqlite3.Connection) -> None:
        self._work: SimpleQueue[tuple[Callable[[], None], Failed] | None] = SimpleQueue()
        self._connection = connection
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None], failed: Failed) -> None:
        """Runs `work` in the thread. An exception is passed to `failed`, which rejects the waiting callers."""
        self._work.put((work, failed))

    def stop(self) -> None:
        """Returns when all work is done."""
        self._work.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while given := self._work.get():
            work, failed = given
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - if the thread ended, later callers would wait for ever
                with suppress(Exception):  # a closed loop has no callers
                    failed(error)
        with suppress(sqlite3.Error):  # no caller is left
            self._connection.close()


def as_store_error(error: BaseException, path: Path) -> Exception:
    """The error for the caller: one line that names the file. The store's own errors stay as they are."""
    translated = _translate(error, path)
    if translated is not error:
        translated.__cause__ = error
    return translated


def _translate(error: BaseException, path: Path) -> Exception:
    if isinstance(error, StoreDamaged) and str(path) not in str(error):
        return StoreDamaged(f"{path} is damaged: {error}")
    if isinstance(error, RollwrightError):
        return error
    if isinstance(error, UnicodeEncodeError):  # a lone surrogate
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
