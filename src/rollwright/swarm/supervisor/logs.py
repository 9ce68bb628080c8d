"""Two logs of one node: JSON lines for programs, and a readable one to `tail -f`.

True of both: they never grow beyond `MOST_BYTES` each, with `KEPT` older ones beside them; a line is never split
between two files. The readable one is emptied in place when it is full, so that a `tail -f` goes on with the new lines.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
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
    """Where a node's words and its supervisor's go. Any thread may write."""

    def __init__(
        self,
        folder: Path,
        *,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.time,
        echo: Callable[[str], None] | None = None,
    ) -> None:
        """`echo` is given every readable line, too."""
        folder.mkdir(parents=True, exist_ok=True)
        self.readable = folder / READABLE
        self.events = folder / EVENTS
        self._most = most_bytes
        self._clock = clock
        self._echo = echo
        self._lock = threading.Lock()

    def said(self, line: str) -> None:
        """A line that the node wrote."""
        self._write("node", line, {"event": "output"})

    def event(self, name: str, text: str, **details: Any) -> None:
        """Something that the supervisor saw or did."""
        self._write("supervisor", text, {"event": name, **details})

    def _write(self, who: str, text: str, details: dict[str, Any]) -> None:
        at, text = self._clock(), text[:MOST_LINE]
        stamp = datetime.fromtimestamp(at, UTC)
        row = {"time": round(at, 3), "from": who, **details, "text": text}
        line = f"{stamp:%Y-%m-%d %H:%M:%S} {who:10} | {text}"
        with self._lock:
            self._add(self.events, json.dumps(row, ensure_ascii=False), in_place=False)
            self._add(self.readable, line, in_place=True)
            if self._echo is not None:
                self._echo(line)

    def _add(self, file: Path, line: str, *, in_place: bool) -> None:
        added = line.encode("utf-8", errors="replace") + b"\n"
        if file.exists() and file.stat().st_size + len(added) > self._most:
            _rotate(file, in_place=in_place)
        with file.open("ab") as log:
            log.write(added)


def _rotate(file: Path, *, in_place: bool) -> None:
    for number in range(KEPT, 1, -1):
        older = file.with_name(f"{file.name}.{number - 1}")
        if older.exists():
            older.replace(file.with_name(f"{file.name}.{number}"))
    first = file.with_name(f"{file.name}.1")
    if in_place:
        shutil.copyfile(file, first)
        with file.open("r+b") as log:
            log.truncate(0)
    else:
        file.replace(first)
