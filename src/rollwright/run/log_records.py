"""Reading the records of a trajectory log past damage, and CRC-32 as an error-correcting code. Pure.

Invariants:
- Damage costs only the records that contain it. A single wrong byte costs nothing, because the checksum corrects it.
  Behind an uncorrectable record, reading continues at the next record with a right checksum, also if a length is damaged.
- A corrected record is accepted only if it can be decoded.

CRC-32 is linear: the effect of a wrong byte on the checksum depends only on the XOR difference and on the number of bytes
behind it. A single pass from the end of the data therefore finds the one position and difference that explain a wrong
checksum. Damage to several bytes is mistaken for one with a probability of about `len(data) / 2**24`, which is why the
result is decoded before it is trusted.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rollwright.errors import FormatError
from rollwright.trajectory import Trajectory

crc32 = zlib.crc32

LARGEST_CORRECTED = 4 * 2**20
"""Largest record, in bytes, whose correction is tried: it takes about a second."""

_POLYNOMIAL = 0xEDB88320


def _byte_steps() -> list[int]:
    """CRC table: register after one step, by the byte that enters it."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_STEP = _byte_steps()
_BY_TOP = {step >> 24: value for value, step in enumerate(_STEP)}
"""The highest byte of each table entry is unique, so a step of the register can be inverted."""
_DIFFERENCE = {step: value for value, step in enumerate(_STEP) if value}


def corrected(data: bytes, checksum: int) -> bytes | None:
    """Data with one byte changed so that it has this checksum; `None` if no single byte explains the difference."""
    if len(data) > LARGEST_CORRECTED:
        return None
    difference = crc32(data) ^ checksum
    for place in range(len(data) - 1, -1, -1):
        if (wrong := _DIFFERENCE.get(difference)) is not None:
            return data[:place] + bytes([data[place] ^ wrong]) + data[place + 1 :]
        # Undo the step of this byte: the difference as it was before the byte entered the register.
        value = _BY_TOP[difference >> 24]
        difference = ((difference ^ _STEP[value]) << 8 & 0xFFFFFFFF) | value
    return None


def differs_in_one_byte(one: int, other: int) -> bool:
    """Whether two checksums differ in exactly one byte, so that the stored checksum itself may be damaged."""
    return one != other and sum(bool((one ^ other) >> shift & 0xFF) for shift in (0, 8, 16, 24)) == 1


HEAD = b"RWLOG\x01\n"
FRAME = struct.Struct("<II")
"""Length and CRC-32 of the following record."""
_RECORD_START = b"RWT\x01"
"""First bytes of every encoded trajectory."""


@dataclass
class LogCondition:
    """Damage that one pass over a log found."""

    end: int = len(HEAD)
    """Offset behind the last intact record."""
    cut_off: bool = False
    """Whether the last record is partial, after a crash or while a writer is at work."""
    mended: int = 0
    """Records that their checksum has corrected."""
    damaged: int = 0
    """Unreadable regions; each covers one record or several."""
    damaged_bytes: int = 0
    first_damage: int = 0
    """Offset of the first unreadable region."""

    @property
    def whole(self) -> bool:
        return not self.damaged and not self.mended

    def told(self, file: Path) -> Iterator[str]:
        """One line for each kind of damage."""
        if self.damaged:
            places = "1 damaged place" if self.damaged == 1 else f"{self.damaged:,} damaged places"
            yield (
                f"{file}: {places} ({self.damaged_bytes:,} bytes, from byte {self.first_damage:,} on), "
                "left out; all other records are whole"
            )
        if self.mended:
            records = "1 record" if self.mended == 1 else f"{self.mended:,} records"
            yield f"{file}: {records} had a wrong byte, put right by the checksum"


class _Found(NamedTuple):
    """Result of resynchronizing at an offset without an intact record."""

    encoded: bytes | None
    """The record, if it was corrected."""
    end: int
    """Offset of the next record."""
    half_written: bool = False


def framed(encoded: bytes) -> bytes:
    return FRAME.pack(len(encoded), crc32(encoded)) + encoded


def records(
    log: BinaryIO,
    condition: LogCondition,
    on_damage: Callable[[bytes], None] = lambda data: None,
    *,
    start: int = 0,
) -> Iterator[bytes]:
    """Yield the records of a log, from its beginning or from the offset `start`, which is behind an earlier record.
    `condition` collects the damage; `on_damage` gets the skipped bytes."""
    position, size = start, 0
    if not start:
        log.seek(0)
        position = _read_header(log, condition, on_damage)
    log.seek(position)
    while True:
        head = log.read(FRAME.size)
        if not head:
            return
        if len(head) == FRAME.size and position + FRAME.unpack(head)[0] > size:
            size = os.fstat(log.fileno()).st_size
        encoded = _whole(log, head, size)
        if encoded is None:
            found = _resynchronize(log, position)
            if found.half_written:
                condition.cut_off = True
                return
            if found.encoded is None:
                log.seek(position)
                _note_damage(condition, position, log.read(found.end - position), on_damage)
            else:
                condition.mended += 1
            encoded, position = found.encoded, found.end
            log.seek(position)
        else:
            position += FRAME.size + len(encoded)
        if encoded is not None:
            condition.end = position
            yield encoded


def _read_header(log: BinaryIO, condition: LogCondition, on_damage: Callable[[bytes], None]) -> int:
    """Check the header; returns the offset of the first record."""
    head = log.read(len(HEAD))
    if head == HEAD:
        return len(HEAD)
    size = os.fstat(log.fileno()).st_size
    if size <= len(HEAD) and HEAD.startswith(head):
        condition.cut_off = True  # its writer was killed before the header was complete
        return size
    log.seek(len(HEAD))
    begins_well = _whole(log, log.read(FRAME.size), size) is not None
    if not begins_well and not _finds_any(log):
        raise FormatError(
            f"{log.name}: is not a trajectory log of this release, or damaged from end to end; where it is missing, "
            "`rollwright resume` begins a new one with what the store still has"
        )
    if begins_well:
        condition.mended += 1
        return len(HEAD)
    _note_damage(condition, 0, head, on_damage)
    return len(HEAD)


def _finds_any(log: BinaryIO) -> bool:
    with mmap.mmap(log.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _next_record(data, 0) is not None


def _note_damage(
    condition: LogCondition, start: int, data: bytes, on_damage: Callable[[bytes], None]
) -> None:
    if not condition.damaged:
        condition.first_damage = start
    condition.damaged += 1
    condition.damaged_bytes += len(data)
    on_damage(data)


def _whole(log: BinaryIO, head: bytes, log_size: int) -> bytes | None:
    """The record behind this frame, if it is intact."""
    if len(head) < FRAME.size:
        return None
    size, checksum = FRAME.unpack(head)
    if not size or size > log_size:
        return None
    encoded = log.read(size)
    return encoded if len(encoded) == size and crc32(encoded) == checksum else None


def whole_record(file: BinaryIO) -> bytes | None:
    """The record at a file's position, if it is intact; `None` at the end of the file, too."""
    return _whole(file, file.read(FRAME.size), os.fstat(file.fileno()).st_size)


def _resynchronize(log: BinaryIO, position: int) -> _Found:
    """Correct the record at this offset, or skip to the next intact record."""
    with mmap.mmap(log.fileno(), 0, access=mmap.ACCESS_READ) as data:
        size, checksum = 0, 0
        if position + FRAME.size <= len(data):
            size, checksum = FRAME.unpack_from(data, position)
        start = position + FRAME.size
        end = start + size
        reaches_beyond = not size or end > len(data)
        # If another record or the end of the log follows, the length is right, and only the content is damaged.
        if not reaches_beyond and (end == len(data) or _is_record(data, end)):
            return _Found(correct_record(data[start:end], checksum), end)
        after = _next_record(data, position + 1)
        end = len(data) if after is None else after
        encoded = data[start:end]
        if encoded and crc32(encoded) == checksum:  # only its length was damaged
            return _Found(encoded, end)
        half_written = after is None and (reaches_beyond or not any(encoded))
        return _Found(None, end, half_written)


def _is_record(data: mmap.mmap, position: int) -> bool:
    if position + FRAME.size > len(data):
        return False
    size, checksum = FRAME.unpack_from(data, position)
    start = position + FRAME.size
    return bool(0 < size <= len(data) - start and crc32(data[start : start + size]) == checksum)


def _next_record(data: mmap.mmap, position: int) -> int | None:
    """Offset of the next intact record."""
    found = data.find(_RECORD_START, position + FRAME.size)
    while found >= 0:
        if _is_record(data, found - FRAME.size):
            return found - FRAME.size
        found = data.find(_RECORD_START, found + 1)
    return None


def correct_record(encoded: bytes, checksum: int) -> bytes | None:
    """The original record, if a single byte of it or of its checksum is wrong."""
    candidate = corrected(encoded, checksum)
    if candidate is None and differs_in_one_byte(crc32(encoded), checksum):
        candidate = encoded
    if candidate is None:
        return None
    try:
        Trajectory.from_bytes(candidate)
    except FormatError:
        return None
    return candidate


def rollout_of(encoded: bytes, file: Path) -> str:
    """The id of the rollout of an intact record."""
    try:
        return Trajectory.read_rollout_id(encoded)
    except FormatError as error:
        raise FormatError(f"{file}: {error}") from error


def decoded(encoded: bytes, file: Path) -> Trajectory:
    try:
        return Trajectory.from_bytes(encoded)
    except FormatError as error:
        raise FormatError(f"{file}: {error}") from error
