"""Index of a trajectory log: which rollouts are in which part of it, so that a log of many records is opened again without
decoding one.

Invariants:
- The log alone is the truth. A part of the index counts only if the log still has exactly the bytes that it was made of: all
  of them are read and their checksum compared, so that damage of any byte is found as without an index.
- A part is made only of records whose own checksums are right.
- An index that is missing, damaged, or of another log costs time, nothing else: what it does not cover is read record by
  record, and indexed again. It is removed before a log is rewritten.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from rollwright.errors import naming
from rollwright.run.log_records import FRAME, HEAD, crc32, framed, whole_record

INDEX_SUFFIX = ".index"
"""Behind the name of the log."""
_INDEX_HEAD = b"RWIDX\x01\n"

PART_BYTES = 16 * 2**20
"""Bytes of the log after which a part ends: what is held in memory to check it."""

FEWEST_RECORDS = 256
"""New records that are worth a part; to read fewer from the log takes milliseconds."""


class LogPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive records of the log, from the end of the part before, or from the log's header on."""

    end: int
    """Offset in the log behind the last of them."""
    checksum: int
    """CRC-32 of all bytes, frames and header included."""
    rollout_ids: list[str]
    sizes: list[int]
    """Sizes of the encoded trajectories."""

    def fits(self, start: int) -> bool:
        """Whether its records fill the log from `start` to its end."""
        head = 0 if start else len(HEAD)
        framed_bytes = sum(self.sizes) + FRAME.size * len(self.sizes)
        return len(self.rollout_ids) == len(self.sizes) and start + head + framed_bytes == self.end


class LogBoundary(NamedTuple):
    """End of the last indexed part; with its checksum, it is of this log and of no other."""

    end: int = 0
    checksum: int = 0
    records: int = 0
    """Records of the log up to there."""


class LogIndex:
    """The index beside a log, read by `verified` and continued by `extend`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self.file = log.with_name(log.name + INDEX_SUFFIX)
        self.boundary = LogBoundary()
        self._valid_bytes = 0
        """Bytes of the index that count; what is behind them is overwritten."""
        self.boundaries: set[LogBoundary] = set()
        """Ends of all parts that are verified or written."""

    def verified(self, log: BinaryIO) -> Iterator[tuple[int, LogPart]]:
        """Yield the parts that the log's bytes agree with, each with its start; ends at the first that does not agree."""
        try:
            with self.file.open("rb") as opened:
                if opened.read(len(_INDEX_HEAD)) != _INDEX_HEAD:
                    return
                self._valid_bytes = len(_INDEX_HEAD)
                log.seek(0)
                while (encoded := whole_record(opened)) is not None:
                    part, start = _decoded(encoded), self.boundary.end
                    if part is None or not part.fits(start):
                        return
                    data = log.read(part.end - start)
                    if len(data) != part.end - start or crc32(data) != part.checksum:
                        return
                    self._add(part, len(encoded))
                    yield start, part
        except FileNotFoundError:
            return

    def extend(self, log: BinaryIO, placed: Iterator[tuple[str, int]], end: int) -> None:
        """Index the records between the last part and `end`; `placed` has the ids of their rollouts, each with the offset at
        which its trajectory begins."""
        log.seek(self.boundary.end)
        parts: list[bytes] = []
        while self.boundary.end < end:
            part = _made(log, self.boundary.end, placed, end)
            if part is None:  # what is not as it was written is said by the next process that opens the log
                break
            parts.append(msgspec.msgpack.encode(part))
            self._add(part, len(parts[-1]))
        self._write(parts)

    def remove(self) -> None:
        """Remove the index, because the log is about to be rewritten."""
        self.file.unlink(missing_ok=True)
        self.boundary, self._valid_bytes = LogBoundary(), 0
        self.boundaries.clear()

    def _add(self, part: LogPart, size: int) -> None:
        records = self.boundary.records + len(part.rollout_ids)
        self.boundary = LogBoundary(part.end, part.checksum, records)
        self.boundaries.add(self.boundary)
        self._valid_bytes = max(self._valid_bytes, len(_INDEX_HEAD)) + FRAME.size + size

    def _write(self, parts: list[bytes]) -> None:
        if not parts:
            return
        added = sum(FRAME.size + len(each) for each in parts)
        with naming(self.file), self.file.open("r+b" if self.file.exists() else "w+b") as opened:
            opened.write(_INDEX_HEAD)
            opened.truncate(self._valid_bytes - added)
            opened.seek(self._valid_bytes - added)
            opened.writelines(map(framed, parts))


def _made(log: BinaryIO, start: int, placed: Iterator[tuple[str, int]], end: int) -> LogPart | None:
    """The next part of the log, whose position is `start`; `None` if a record is damaged, or not where it should be."""
    position, checksum = start, 0
    if not start:
        head = log.read(len(HEAD))
        if head != HEAD:
            return None
        position, checksum = len(HEAD), crc32(head)
    ids: list[str] = []
    sizes: list[int] = []
    while position < end and position - start < PART_BYTES:
        encoded, (rollout_id, begins) = whole_record(log), next(placed, ("", 0))
        if encoded is None or begins != position + FRAME.size:
            return None
        checksum = crc32(framed(encoded), checksum)
        ids.append(rollout_id)
        sizes.append(len(encoded))
        position += FRAME.size + len(encoded)
    return LogPart(position, checksum, ids, sizes)


_decoder = msgspec.msgpack.Decoder(LogPart)


def _decoded(encoded: bytes) -> LogPart | None:
    try:
        return _decoder.decode(encoded)
    except msgspec.MsgspecError:
        return None
