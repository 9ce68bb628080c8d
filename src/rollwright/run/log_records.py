"""CRC-32 that not only finds damage but undoes it where one byte is wrong. Pure.

A checksum of 32 bits is a linear function of the data, so what a wrong byte does to it depends on the difference and on
how many bytes follow, and on nothing else. Going through the data from its end, the one place and the one difference
that explain a wrong checksum are found in a single pass. Damage to more than one byte is taken for that of one with a
chance of about `len(data) / 2**24`; so whoever corrects a record also checks that it can be read.

The records of a trajectory log, read past whatever damage there is.

Always true: damage costs the records that it is in and no others. One wrong byte costs nothing, the checksum puts it
right. Behind what cannot be put right, reading goes on at the next record whose checksum is right, also where a length
is damaged.
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
"""Bytes of a record that is still tried: a second of work, for a record that is lost otherwise."""

_POLYNOMIAL = 0xEDB88320


def _byte_steps() -> list[int]:
    """What the checksum becomes when a byte with only this in it follows."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_STEP = _byte_steps()
_BY_TOP = {step >> 24: value for value, step in enumerate(_STEP)}
"""The steps have different highest bytes, so a step can be taken back."""
_DIFFERENCE = {step: value for value, step in enumerate(_STEP) if value}


def corrected(data: bytes, checksum: int) -> bytes | None:
    """The data with one byte changed so that it has this checksum; `None`: one byte is not what is wrong with it."""
    if len(data) > LARGEST_CORRECTED:
        return None
    difference = crc32(data) ^ checksum
    for place in range(len(data) - 1, -1, -1):
        if (wrong := _DIFFERENCE.get(difference)) is not None:
            return data[:place] + bytes([data[place] ^ wrong]) + data[place + 1 :]
        value = _BY_TOP[difference >> 24]
        difference = ((difference ^ _STEP[value]) << 8 & 0xFFFFFFFF) | value
    return None


def differs_in_one_byte(one: int, other: int) -> bool:
    """Whether a checksum can be the other with one of its own bytes damaged."""
    return one != other and sum(bool((one ^ other) >> shift & 0xFF) for shift in (0, 8, 16, 24)) == 1


HEAD = b"RWLOG\x01\n"
FRAME = struct.Struct("<II")
"""Length and CRC-32 of the record that follows."""
_RECORD_START = b"RWT\x01"
"""What an encoded trajectory begins with."""


@dataclass
class LogCondition:
    """What one reading of a log found to be wrong with it."""

    end: int = len(HEAD)
    """Behind the last whole record."""
    cut_off: bool = False
    """Whether the last record is half written, as a crash leaves it, or a writer that has not come to its end."""
    mended: int = 0
    """Records that were put right by their checksum."""
    damaged: int = 0
    """Places that cannot be read; each is one record or several."""
    damaged_bytes: int = 0
    first_damage: int = 0
    """Where the first of them begins."""

    @property
    def whole(self) -> bool:
        return not self.damaged and not self.mended

    def told(self, file: Path) -> Iterator[str]:
        """In a line for each kind."""
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
    """What is at a place of the log that is not a whole record."""

    encoded: bytes | None
    """The record, if it can be put right."""
    end: int
    """Where reading goes on."""
    half_written: bool = False


def framed(encoded: bytes) -> bytes:
    return FRAME.pack(len(encoded), crc32(encoded)) + encoded


def records(
    log: BinaryIO, condition: LogCondition, on_damage: Callable[[bytes], None] = lambda data: None
) -> Iterator[bytes]:
    """The records of a log, from its beginning. `condition` says, when they are read, what is wrong with it; `on_damage`
    is told what is left out."""
    position = _begin(log, condition, on_damage)
    while True:
        log.seek(position)
        head = log.read(FRAME.size)
        if not head:
            return
        encoded = _whole(log, head)
        if encoded is None:
            found = _resynchronised(log, position)
            if found.half_written:
                condition.cut_off = True
                return
            if found.encoded is None:
                log.seek(position)
                _note_damage(condition, position, log.read(found.end - position), on_damage)
            else:
                condition.mended += 1
            encoded, position = found.encoded, found.end
        else:
            position += FRAME.size + len(encoded)
        if encoded is not None:
            condition.end = position
            yield encoded


def _begin(log: BinaryIO, condition: LogCondition, on_damage: Callable[[bytes], None]) -> int:
    """Where the first record is."""
    head = log.read(len(HEAD))
    if head == HEAD:
        return len(HEAD)
    size = os.fstat(log.fileno()).st_size
    if size <= len(HEAD) and HEAD.startswith(head):
        condition.cut_off = True  # it was killed when it began
        return size
    log.seek(len(HEAD))
    begins_well = _whole(log, log.read(FRAME.size)) is not None
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


def _whole(log: BinaryIO, head: bytes) -> bytes | None:
    """The record behind this frame, if it is whole."""
    if len(head) < FRAME.size:
        return None
    size, checksum = FRAME.unpack(head)
    if not size or size > os.fstat(log.fileno()).st_size:
        return None
    encoded = log.read(size)
    return encoded if len(encoded) == size and crc32(encoded) == checksum else None


def _resynchronised(log: BinaryIO, position: int) -> _Found:
    """What is here, up to the next whole record."""
    with mmap.mmap(log.fileno(), 0, access=mmap.ACCESS_READ) as data:
        size, checksum = 0, 0
        if position + FRAME.size <= len(data):
            size, checksum = FRAME.unpack_from(data, position)
        start = position + FRAME.size
        end = start + size
        reaches_beyond = not size or end > len(data)
        # Where its length is right, another record or the end of the log is behind it.
        if not reaches_beyond and (end == len(data) or _is_record(data, end)):
            return _Found(_mended(data[start:end], checksum), end)
        after = _next_record(data, position + 1)
        end = len(data) if after is None else after
        encoded = data[start:end]
        if encoded and crc32(encoded) == checksum:  # its length alone was wrong
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
    """Where the next whole record begins, from here on."""
    found = data.find(_RECORD_START, position + FRAME.size)
    while found >= 0:
        if _is_record(data, found - FRAME.size):
            return found - FRAME.size
        found = data.find(_RECORD_START, found + 1)
    return None


def _mended(encoded: bytes, checksum: int) -> bytes | None:
    """What was written, if one byte of it or of its checksum is wrong."""
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


def decoded(encoded: bytes, file: Path) -> Trajectory:
    try:
        return Trajectory.from_bytes(encoded)
    except FormatError as error:
        raise FormatError(f"{file}: {error}") from error
