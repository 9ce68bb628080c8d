"""The two logs of the memory store: completions and events. Both grow at the end and shrink at the front.

Deleting a rollout removes its completion; the cursors of the others stay.
"""

from collections import deque
from itertools import islice

from rollwright.store.memory.rows import StoredRollout
from rollwright.store.records import CompletionEntry, Event, EventKind


class CompletionLog:
    def __init__(self) -> None:
        self._first = 1
        """Cursor of the first kept entry."""
        self._entries: list[tuple[StoredRollout, CompletionEntry] | None] = []
        self._gone = 0
        """Deleted entries at the front that still take a place in the list."""

    @property
    def last(self) -> int:
        return self._first + len(self._entries) - 1

    def add(self, row: StoredRollout, attempt_id: str | None, reason: str | None) -> int:
        cursor = self.last + 1
        self._entries.append((row, CompletionEntry(cursor, row.rollout_id, attempt_id, row.status, reason)))
        return cursor

    def remove(self, cursor: int) -> None:
        entries = self._entries
        entries[cursor - self._first] = None
        while self._gone < len(entries) and entries[self._gone] is None:
            self._gone += 1
        if self._gone > len(entries) // 2:
            del entries[: self._gone]
            self._first += self._gone
            self._gone = 0

    def after(self, cursor: int, limit: int) -> list[CompletionEntry]:
        found: list[CompletionEntry] = []
        for place in range(max(cursor + 1 - self._first, self._gone), len(self._entries)):
            entry = self._entries[place]
            if len(found) >= limit:
                break
            if entry is not None:
                found.append(entry[1])
        return found

    def ended_before(self, time: float, limit: int) -> list[StoredRollout]:
        """The oldest rollouts in the log, up to the first that ended at `time` or later."""
        rows: list[StoredRollout] = []
        for entry in self._entries[self._gone :] if limit else ():
            if entry is None:
                continue
            ended = entry[0].end_time
            if len(rows) >= limit or ended is None or ended >= time:
                break
            rows.append(entry[0])
        return rows


class EventLog:
    def __init__(self, recording: bool) -> None:
        self._recording = recording
        self._events: deque[Event] = deque()
        self._last = 0

    def add(
        self,
        time: float,
        kind: EventKind,
        rollout_id: str,
        attempt_id: str | None = None,
        worker_id: str | None = None,
        status: str | None = None,
        lease_expires: float | None = None,
        becomes: str | None = None,
    ) -> None:
        if self._recording:
            self._last += 1
            self._events.append(
                Event(
                    self._last, time, kind, rollout_id, attempt_id, worker_id, status, lease_expires, becomes
                )
            )

    def after(self, sequence: int, limit: int) -> list[Event]:
        first = self._events[0].sequence if self._events else 1
        start = max(sequence + 1 - first, 0)
        start = min(start, len(self._events))  # a cursor may be any number
        return list(islice(self._events, start, start + limit))

    def forget_before(self, time: float) -> None:
        while self._events and self._events[0].time < time:
            self._events.popleft()
