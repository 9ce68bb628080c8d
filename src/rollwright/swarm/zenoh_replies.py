"""Answers to the queries of others, on a thread of their own.

True of it: taking a query never waits. zenoh holds a thread that sends up to some seconds when the other side does not
read, and then closes that link; if that were the thread that takes queries, zenoh would soon read from nobody any more.
The newest query is answered first, because whoever asked it still waits; when too many wait, the oldest goes unanswered.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable

MAX_WAITING = 1024
"""Queries: what honest nodes ask of one owner in the time that an answer may be held up, many times over."""


class ReplyThread:
    """One thread, started when it is needed: more than one would only wait for the same link, one after the other."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._waiting: deque[Callable[[], None]] = deque(maxlen=max_waiting)
        self._changed = threading.Condition()
        self._started = False
        self._closed = False

    def send(self, reply: Callable[[], None]) -> None:
        """Soon, on the thread; what it raises is lost, as its asker is."""
        with self._changed:
            if self._closed:
                return
            self._waiting.append(reply)
            if not self._started:
                self._started = True
                threading.Thread(target=self._work, name="zenoh-replies", daemon=True).start()
            self._changed.notify()

    def close(self) -> None:
        """Leaves the rest unanswered."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify()

    def _work(self) -> None:
        while (reply := self._next()) is not None:
            with contextlib.suppress(Exception):  # the asker, or this node, has gone
                reply()
            del reply  # zenoh tells the asker that this was all once nobody holds its query

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return self._waiting.pop() if self._waiting else None
