"""A SQLite connection, the thread that may block on it, and how operations run on it.

True of it: what is put into a thread is run in that order, and all of it before the connection is closed.
"""

import sqlite3
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from rollwright.store.sql.statements import Operation

Result = TypeVar("Result")


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
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._connection = connection
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def stop(self) -> None:
        """Returns when all that was put in is done."""
        self._work.put(None)
        self._thread.join()

    def _serve(self) -> None:
        try:
            while work := self._work.get():
                work()
        finally:
            self._connection.close()
