"""Files of a run that are still being written: read from where the last look ended, without ever reading all again.

Invariants: a record or a line is read once, when it is whole. A file that was replaced or became shorter, as pruning and
resuming do, is read again from its beginning, and the reader says so. Damage is skipped as `log_records` skips it.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rollwright.errors import FormatError
from rollwright.run.log_records import FRAME, LogCondition, correct_record, framed, records
from rollwright.run.sealed_rows import parse_rows


class GrowingLog:
    """A trajectory log; `read` brings the records since the last call."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._opened: BinaryIO | None = None
        self._end = 0
        self.condition = LogCondition()
        """Damage found so far."""
        self._settled = LogCondition()
        """Damage before the last record read; damage behind it is found again when the log has grown."""
        self.problem: str | None = None
        """Why the file as a whole cannot be read."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        try:
            return self._file.stat().st_size
        except OSError:
            return 0

    @property
    def read_bytes(self) -> int:
        return self._end

    def was_replaced(self) -> bool:
        """Whether everything read so far is of another file; the caller then starts with a new `GrowingLog`."""
        if self._opened is None:
            return False
        try:
            now = self._file.stat()
        except OSError:
            return True
        return not os.path.samestat(os.fstat(self._opened.fileno()), now) or now.st_size < self._end

    def read(self, seconds: float) -> Iterator[tuple[int, bytes]]:
        """Yield offset and content of further records, for at most so long."""
        try:
            if self._opened is None:
                self._opened = self._file.open("rb")
        except OSError as error:
            self.problem = f"{self._file}: {error.strerror}"
            return
        until = time.monotonic() + seconds
        found = LogCondition(end=self._end)
        earlier = self._settled
        try:
            for encoded in records(self._opened, found, start=self._end):
                self._end = found.end
                self.condition = self._settled = _together(earlier, found)
                yield found.end - len(encoded), encoded
                if time.monotonic() > until:
                    return
            self.condition = _together(earlier, found)
            self.problem = None
        except FormatError as error:
            self.problem = str(error)

    def record(self, start: int, size: int) -> bytes:
        """The record at this place, corrected where its checksum can; raises a `FormatError` if it is not whole."""
        if self._opened is None:
            self._opened = self._file.open("rb")
        frame = os.pread(self._opened.fileno(), FRAME.size + size, start - FRAME.size)
        encoded = frame[FRAME.size :]
        if frame != framed(encoded):
            mended = correct_record(encoded, FRAME.unpack(frame[: FRAME.size])[1])
            if mended is None:
                raise FormatError(f"{self._file}: the record at byte {start:,} is damaged")
            return mended
        return encoded

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def _together(one: LogCondition, other: LogCondition) -> LogCondition:
    return LogCondition(
        end=other.end,
        cut_off=other.cut_off,
        mended=one.mended + other.mended,
        damaged=one.damaged + other.damaged,
        damaged_bytes=one.damaged_bytes + other.damaged_bytes,
        first_damage=one.first_damage if one.damaged else other.first_damage,
    )


class GrowingRows:
    """A file of JSON lines, sealed or not; `read` brings all rows so far and parses only the new ones."""

    def __init__(
        self, file: Path, fits: Callable[[Mapping[str, Any]], bool] = bool, *, sealed: bool = True
    ) -> None:
        self._file = file
        self._fits = fits
        self._sealed = sealed
        self._identity: tuple[int, int] | None = None
        self._end = 0
        self.rows: list[dict[str, Any]] = []
        self.problems: list[str] = []

    def read(self) -> list[dict[str, Any]]:
        try:
            with self._file.open("rb") as opened:
                now = os.fstat(opened.fileno())
                identity = (now.st_dev, now.st_ino)
                if identity != self._identity or now.st_size < self._end:
                    self._identity, self._end, self.rows, self.problems = identity, 0, [], []
                if now.st_size == self._end:
                    return self.rows
                opened.seek(self._end)
                content = opened.read()
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self.problems = [f"{self._file}: {error.strerror}"]
            return self.rows
        whole = content[: content.rfind(b"\n") + 1]
        self._end += len(whole)
        self._parse(whole)
        return self.rows

    def _parse(self, whole: bytes) -> None:
        if self._sealed:
            found = parse_rows(self._file, whole)
            rows, lost = found.rows, list(found.told())
        else:
            rows, lost = [], []
            for line in filter(bytes.strip, whole.split(b"\n")):
                try:
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError
                    rows.append(row)
                except ValueError:
                    lost.append(f"{self._file}: a line cannot be read and is left out")
        kept = [row for row in rows if self._fits(row)]
        if len(kept) < len(rows):
            lost.append(f"{self._file}: {len(rows) - len(kept)} lines lack required fields and are left out")
        self.rows = [*self.rows, *kept]
        self.problems += [line for line in lost if line not in self.problems]
