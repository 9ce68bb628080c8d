"""Two logs of one node: JSON lines for programs, and a readable one to `tail -f`.

Invariants: each log has at most `MOST_BYTES`, with `KEPT` older files beside it, and no line is split between two files.
The readable log is truncated in place when it is full, so that a `tail -f` continues with the new lines.
"""

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

MOST_BYTES = 10_000_000
"""About a week of a node that writes a few lines each round."""

KEPT = 5
"""Older files of each log."""

MOST_LINE = 4_000
"""Characters of one line; a model's whole output does not belong in a log."""

READABLE, EVENTS = "node.log", "events.jsonl"


class NodeLogs:
    """Writes the node's output and the supervisor's events. Safe to use from threads."""

    def __init__(
        self,
        folder: Path,
        *,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.time,
        echo: Callable[[str], None] | None = None,
    ) -> None:
        """`echo` is called with every readable line, too."""
        folder.mkdir(parents=True, exist_ok=True)
        self.readable = folder / READABLE
        self.events = folder / EVENTS
        self._clock = clock
        self._echo = echo
        self._lock = threading.Lock()
        self._event_log = _handler(self.events, most_bytes)
        self._readable_log = _handler(self.readable, most_bytes)
        self._readable_log.rotator = _truncate_in_place

    def write_output(self, line: str) -> None:
        """Log a line that the node wrote."""
        self._write("node", line, {"event": "output"})

    def write_event(self, name: str, text: str, **details: Any) -> None:
        """Log an observation or an action of the supervisor."""
        self._write("supervisor", text, {"event": name, **details})

    def close(self) -> None:
        self._event_log.close()
        self._readable_log.close()

    def _write(self, who: str, text: str, details: dict[str, Any]) -> None:
        at, text = self._clock(), text[:MOST_LINE]
        stamp = datetime.fromtimestamp(at, UTC)
        row = {"time": round(at, 3), "from": who, **details, "text": text}
        line = f"{stamp:%Y-%m-%d %H:%M:%S} {who:10} | {text}"
        # Under one lock for both logs and the echo: their lines stand in the same order.
        with self._lock:
            self._event_log.handle(_record(json.dumps(row, ensure_ascii=False)))
            self._readable_log.handle(_record(line))
            if self._echo is not None:
                self._echo(line)


def _handler(file: Path, most_bytes: int) -> RotatingFileHandler:
    return RotatingFileHandler(
        file, maxBytes=most_bytes, backupCount=KEPT, encoding="utf-8", errors="replace", delay=True
    )


def _record(line: str) -> logging.LogRecord:
    return logging.LogRecord(__name__, logging.INFO, __file__, 0, line, None, None)


def _truncate_in_place(source: str, target: str) -> None:
    """The rotator of the readable log: copies it away and keeps the file itself, which `tail -f` has open."""
    shutil.copyfile(source, target)
    with open(source, "r+b") as log:
        log.truncate(0)
