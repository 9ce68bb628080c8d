"""The log of a run's finished trajectories: records, each with its length and checksum before it.

Always true: damage costs the records that it is in and no others. One wrong byte costs nothing, the checksum puts it
right. Behind what cannot be put right, reading goes on at the next record whose checksum is right, also where a length
is damaged. Only what a crash left half written at the end is ever cut off; damaged bytes are kept aside, beside the log.
One process at a time writes.
"""

import fcntl
import mmap
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rollwright.errors import FormatError, RollwrightError
from rollwright.run.checksums import corrected, crc32, differs_in_one_byte
from rollwright.run.writing import naming
from rollwright.trajectory import Trajectory

HEAD = b"RWLOG\x01\n"
_FRAME = struct.Struct("<II")
"""Length and CRC-32 of the record that follows."""
_RECORD_START = b"RWT\x01"
"""What an encoded trajectory begins with."""

TRAJECTORIES = "trajectories.rwlog"
DAMAGED = f"{TRAJECTORIES}.damaged"
"""Bytes that are no records any more, in the order in which they were found."""


class Place(NamedTuple):
    """Where an encoded trajectory is in the log."""

    start: int
    size: int


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
            yield f"{file}: {records} had a wrong byte and was put right by its checksum"


class _Found(NamedTuple):
    """What is at a place of the log that is not a whole record."""

    encoded: bytes | None
    """The record, if it can be put right."""
    end: int
    """Where reading goes on."""
    half_written: bool = False


def framed(encoded: bytes) -> bytes:
    return _FRAME.pack(len(encoded), crc32(encoded)) + encoded


def records(
    log: BinaryIO, condition: LogCondition, on_damage: Callable[[bytes], None] = lambda data: None
) -> Iterator[bytes]:
    """The records of a log, from its beginning. `condition` says, when they are read, what is wrong with it; `on_damage`
    is told what is left out."""
    position = _begin(log, condition, on_damage)
    while True:
        log.seek(position)
        head = log.read(_FRAME.size)
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
            position += _FRAME.size + len(encoded)
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
    begins_well = _whole(log, log.read(_FRAME.size)) is not None
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
    if len(head) < _FRAME.size:
        return None
    size, checksum = _FRAME.unpack(head)
    if not size or size > os.fstat(log.fileno()).st_size:
        return None
    encoded = log.read(size)
    return encoded if len(encoded) == size and crc32(encoded) == checksum else None


def _resynchronised(log: BinaryIO, position: int) -> _Found:
    """What is here, up to the next whole record."""
    with mmap.mmap(log.fileno(), 0, access=mmap.ACCESS_READ) as data:
        size, checksum = 0, 0
        if position + _FRAME.size <= len(data):
            size, checksum = _FRAME.unpack_from(data, position)
        start = position + _FRAME.size
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
    if position + _FRAME.size > len(data):
        return False
    size, checksum = _FRAME.unpack_from(data, position)
    start = position + _FRAME.size
    return bool(0 < size <= len(data) - start and crc32(data[start : start + size]) == checksum)


def _next_record(data: mmap.mmap, position: int) -> int | None:
    """Where the next whole record begins, from here on."""
    found = data.find(_RECORD_START, position + _FRAME.size)
    while found >= 0:
        if _is_record(data, found - _FRAME.size):
            return found - _FRAME.size
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


class TrajectoryLog:
    """The log being written. It knows where each trajectory is, so it also gives them back."""

    def __init__(self, file: Path, opened: BinaryIO, places: dict[str, Place], end: int) -> None:
        """`opened` is locked, and stands at its end."""
        self._file = file
        self._opened = opened
        self._places = places
        self._end = end

    @classmethod
    def create(cls, file: Path) -> "TrajectoryLog":
        opened = file.open("w+b")
        lock(opened, file.parent)
        with naming(file):
            opened.write(HEAD)
            opened.flush()
        return cls(file, opened, {}, len(HEAD))

    @classmethod
    def reopen(cls, file: Path) -> tuple["TrajectoryLog", LogCondition]:
        """Cuts off what a crash left half written, and takes out what is damaged; also gives what was wrong."""
        opened: BinaryIO = file.open("r+b")
        lock(opened, file.parent)
        if not _is_at(opened, file):  # its writer has just put another in its place
            raise taken(file.parent)
        condition = LogCondition()
        places: dict[str, Place] = {}
        with naming(file):
            for encoded in records(opened, condition):
                rollout_id = decoded(encoded, file).rollout_id
                places[rollout_id] = Place(condition.end - len(encoded), len(encoded))
            if not condition.whole:
                opened, places = _rewritten(file, opened)
                end = os.fstat(opened.fileno()).st_size
                return cls(file, opened, places, end), condition
            if condition.end == len(HEAD):
                opened.seek(0)
                opened.write(HEAD)  # of one that was killed when it began
            opened.truncate(condition.end)
            opened.seek(condition.end)
        return cls(file, opened, places, condition.end), condition

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def rollouts(self) -> list[str]:
        """All that are in it, in the order in which they were added."""
        return list(self._places)

    def append(self, rollout_id: str, encoded: bytes) -> None:
        """Adds it once, however often it is given."""
        if rollout_id in self._places:
            return
        with naming(self._file):
            self._opened.write(framed(encoded))
        self._places[rollout_id] = Place(self._end + _FRAME.size, len(encoded))
        self._end += _FRAME.size + len(encoded)

    def read(self, rollout_ids: Iterable[str]) -> dict[str, bytes]:
        """Those of them that it has, and can read."""
        there = [each for each in rollout_ids if each in self._places]
        if there:
            self.flush()
        found: dict[str, bytes] = {}
        for rollout_id in there:
            place = self._places[rollout_id]
            frame = os.pread(self._opened.fileno(), _FRAME.size + place.size, place.start - _FRAME.size)
            encoded = frame[_FRAME.size :]
            if frame == framed(encoded):
                found[rollout_id] = encoded
        return found

    def flush(self) -> None:
        """What was added can be read by others, and survives the end of this process."""
        with naming(self._file):
            self._opened.flush()

    def sync(self) -> Callable[[], None]:
        """Gives a call, for any thread: when that returns, what was added until now survives a power cut."""
        self.flush()
        handle = os.dup(self._opened.fileno())  # another log may take this one's place meanwhile

        def wait() -> None:
            try:
                with naming(self._file):
                    os.fdatasync(handle)
            finally:
                os.close(handle)

        return wait

    def copy_without(self, leaves_out: Callable[[str], bool]) -> "LogCopy":
        """A copy beside it without some of the rollouts, to take its place. Others may append meanwhile."""
        self.flush()
        return LogCopy.make(self._file, leaves_out)

    def become(self, copy: "LogCopy") -> None:
        """Puts the copy in its place, with what was written since it was made."""
        self.flush()
        moved = copy.places
        opened, shift = copy.put_in_place()
        for rollout_id, place in self._places.items():
            if place.start > copy.end:
                moved[rollout_id] = Place(place.start + shift, place.size)
        self._opened.close()
        self._opened, self._places = opened, moved
        self._end += shift

    def close(self) -> None:
        with naming(self._file):
            self._opened.close()


class LogCopy:
    """A copy of a log without some of its records, which is to take its place."""

    def __init__(self, file: Path, partial: BinaryIO) -> None:
        self._file = file
        self._partial = partial
        self.places: dict[str, Place] = {}
        """Of what was copied, in the copy."""
        self.end = len(HEAD)
        """Up to where the log was copied."""

    @classmethod
    def make(cls, file: Path, leaves_out: Callable[[str], bool]) -> "LogCopy":
        with naming(_partial(file)):
            partial = _partial(file).open("w+b")
            copy = cls(file, partial)
            partial.write(HEAD)
            written = len(HEAD)
            condition = LogCondition()
            damage: list[bytes] = []
            with file.open("rb") as log:
                for encoded in records(log, condition, damage.append):
                    copy.end = condition.end
                    rollout_id = decoded(encoded, file).rollout_id
                    if not leaves_out(rollout_id):
                        partial.write(framed(encoded))
                        copy.places[rollout_id] = Place(written + _FRAME.size, len(encoded))
                        written += _FRAME.size + len(encoded)
            flush_through(partial)
        _keep_aside(file, damage)
        return copy

    def put_in_place(self) -> tuple[BinaryIO, int]:
        """With what was written to the log since. Gives the new log, locked, and by how much that has moved."""
        with naming(_partial(self._file)):
            shift = self._partial.tell() - self.end
            with self._file.open("rb") as log:
                log.seek(self.end)
                shutil.copyfileobj(log, self._partial)
            flush_through(self._partial)
            lock(self._partial, self._file.parent)
            _partial(self._file).replace(self._file)
            flush_to_disk(self._file.parent)
        return self._partial, shift


def _rewritten(file: Path, old: BinaryIO) -> tuple[BinaryIO, dict[str, Place]]:
    """The log without what is damaged."""
    copy = LogCopy.make(file, lambda rollout_id: False)
    copy.end = os.fstat(old.fileno()).st_size  # all that is behind the last whole record is cut off
    opened, _ = copy.put_in_place()
    old.close()
    return opened, copy.places


def _keep_aside(file: Path, damage: list[bytes]) -> None:
    if damage:
        aside = file.with_name(DAMAGED)
        with naming(aside), aside.open("ab") as kept:
            kept.writelines(damage)
            flush_through(kept)


def decoded(encoded: bytes, file: Path) -> Trajectory:
    try:
        return Trajectory.from_bytes(encoded)
    except FormatError as error:
        raise FormatError(f"{file}: {error}") from error


def _partial(file: Path) -> Path:
    return file.with_name(f"{file.name}.partial")


def flush_through(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def flush_to_disk(path: Path) -> None:
    """A file's content, or which files a folder has."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(log: BinaryIO, run: Path) -> None:
    """One writer at a time; the lock goes with the process."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise taken(run) from error


def taken(run: Path) -> RollwrightError:
    return RollwrightError(f"{run}: another process is writing to this run")


def _is_at(opened: BinaryIO, file: Path) -> bool:
    """Whether the file that is open is still the one of that name."""
    return os.path.samestat(os.fstat(opened.fileno()), file.stat())
