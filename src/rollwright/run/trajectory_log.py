"""Append-only log of a run's finished trajectories: records, each preceded by its length and checksum.

Invariants: those of `log_records`. Only a partial record at the end, left by a crash, is ever truncated; damaged bytes are
moved to a file beside the log. One process at a time writes. An index beside the log (`log_index`) spares decoding when it is
opened again; it changes no result.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rollwright.errors import RollwrightError, naming
from rollwright.run.log_index import FEWEST_RECORDS, LogBoundary, LogIndex
from rollwright.run.log_records import FRAME, HEAD, LogCondition, framed, records, rollout_of

TRAJECTORIES = "trajectories.rwlog"
DAMAGED = f"{TRAJECTORIES}.damaged"
"""File of the damaged bytes, in the order in which they were found."""


class Place(NamedTuple):
    """Position of an encoded trajectory in the log."""

    start: int
    size: int


class TrajectoryLog:
    """Log open for writing, with an index of its trajectories for random reads."""

    def __init__(self, file: Path, opened: BinaryIO, places: dict[str, Place], end: int) -> None:
        """`opened` is locked and positioned at its end."""
        self._file = file
        self._opened = opened
        self._places = places
        self._end = end
        self._index: LogIndex | None = LogIndex(file)
        """`None` once the log was rewritten, or the index could not be: the next process that opens it makes a new one."""

    @classmethod
    def create(cls, file: Path) -> "TrajectoryLog":
        opened = file.open("w+b")
        lock(opened, file.parent)
        LogIndex(file).remove()
        with naming(file):
            opened.write(HEAD)
            opened.flush()
        return cls(file, opened, {}, len(HEAD))

    @classmethod
    def reopen(cls, file: Path) -> tuple["TrajectoryLog", LogCondition]:
        """Truncate a partial record at the end, and move damaged bytes aside; also returns the condition of the log."""
        opened: BinaryIO = file.open("r+b")
        lock(opened, file.parent)
        if not _is_current(opened, file):  # its writer has just replaced it (`become`)
            raise _already_locked(file.parent)
        index, places = LogIndex(file), dict[str, Place]()
        with naming(file):
            for start, part in index.verified(opened):
                _place(places, start or len(HEAD), part.rollout_ids, part.sizes)
            start = index.boundary.end
            condition = LogCondition(end=start or len(HEAD))
            for encoded in records(opened, condition, start=start):
                rollout_id = rollout_of(encoded, file)
                places[rollout_id] = Place(condition.end - len(encoded), len(encoded))
            if not condition.whole:
                index.remove()
                opened, places = _rewrite(file, opened)
                end = os.fstat(opened.fileno()).st_size
                return cls(file, opened, places, end), condition
            if condition.end == len(HEAD):
                opened.seek(0)
                opened.write(HEAD)  # its writer was killed before the header was complete
            opened.truncate(condition.end)
            opened.seek(condition.end)
        log = cls(file, opened, places, condition.end)
        log._index = index
        return log, condition

    @property
    def indexed(self) -> LogBoundary:
        """The end of the indexed part."""
        return LogBoundary() if self._index is None else self._index.boundary

    def has_boundary(self, boundary: LogBoundary) -> bool:
        """Whether this log was indexed up to there, and has the same bytes still."""
        return self._index is not None and boundary in self._index.boundaries

    def index(self) -> None:
        """Index the records that were added, if there are enough of them."""
        if self._index is None or len(self._places) - self.indexed.records < FEWEST_RECORDS:
            return
        self.flush()
        new = islice(self._places.items(), self.indexed.records, None)
        try:
            with self._file.open("rb") as opened:
                self._index.extend(opened, ((each, place.start) for each, place in new), self._end)
        except OSError:  # such as a full disk: nothing depends on an index
            self._index = None

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def rollouts(self) -> list[str]:
        """Ids of the logged rollouts, in the order of their addition."""
        return list(self._places)

    def append(self, rollout_id: str, encoded: bytes) -> None:
        """Append a trajectory; a rollout that is in the log already is ignored."""
        if rollout_id in self._places:
            return
        with naming(self._file):
            self._opened.write(framed(encoded))
        self._places[rollout_id] = Place(self._end + FRAME.size, len(encoded))
        self._end += FRAME.size + len(encoded)

    def read(self, rollout_ids: Iterable[str]) -> dict[str, bytes]:
        """Encoded trajectories of these rollouts, as far as they are in the log and intact."""
        there = [each for each in rollout_ids if each in self._places]
        if there:
            self.flush()
        found: dict[str, bytes] = {}
        for rollout_id in there:
            place = self._places[rollout_id]
            frame = os.pread(self._opened.fileno(), FRAME.size + place.size, place.start - FRAME.size)
            encoded = frame[FRAME.size :]
            if frame == framed(encoded):
                found[rollout_id] = encoded
        return found

    def flush(self) -> None:
        """Pass buffered records to the operating system: other processes can read them, and they survive a kill."""
        with naming(self._file):
            self._opened.flush()

    def sync(self) -> Callable[[], None]:
        """Returns a function for any thread; when it returns, all records added until now survive a power cut."""
        self.flush()
        handle = os.dup(self._opened.fileno())  # `become` may close the file meanwhile

        def wait() -> None:
            try:
                with naming(self._file):
                    os.fdatasync(handle)
            finally:
                os.close(handle)

        return wait

    def copy_without(self, leaves_out: Callable[[str], bool]) -> "LogCopy":
        """Copy the log without some of the rollouts, as a replacement. Other threads may append meanwhile."""
        self.flush()
        return LogCopy.make(self._file, leaves_out)

    def become(self, copy: "LogCopy") -> None:
        """Replace the log by the copy, with the records that were appended since it was made."""
        self.flush()
        if self._index is not None:
            self._index.remove()
            self._index = None
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
    """Copy of a log without some of its records, as its replacement."""

    def __init__(self, file: Path, partial: BinaryIO) -> None:
        self._file = file
        self._partial = partial
        self.places: dict[str, Place] = {}
        """Positions of the copied records in the copy."""
        self.end = len(HEAD)
        """Offset up to which the log was copied."""

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
                    rollout_id = rollout_of(encoded, file)
                    if not leaves_out(rollout_id):
                        partial.write(framed(encoded))
                        copy.places[rollout_id] = Place(written + FRAME.size, len(encoded))
                        written += FRAME.size + len(encoded)
            flush_through(partial)
        _keep_aside(file, damage)
        return copy

    def put_in_place(self) -> tuple[BinaryIO, int]:
        """Copy the rest of the log and replace it. Returns the new log, locked, and the shift of the rest in bytes."""
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


def _place(places: dict[str, Place], start: int, rollout_ids: list[str], sizes: list[int]) -> None:
    """Note the places of consecutive records from `start` on."""
    position = start
    for rollout_id, size in zip(rollout_ids, sizes, strict=True):
        position += FRAME.size
        places[rollout_id] = Place(position, size)
        position += size


def _rewrite(file: Path, old: BinaryIO) -> tuple[BinaryIO, dict[str, Place]]:
    """Replace the log by a copy without its damaged bytes."""
    copy = LogCopy.make(file, lambda rollout_id: False)
    copy.end = os.fstat(old.fileno()).st_size  # nothing behind the last intact record is copied
    opened, _ = copy.put_in_place()
    old.close()
    return opened, copy.places


def _keep_aside(file: Path, damage: list[bytes]) -> None:
    if damage:
        aside = file.with_name(DAMAGED)
        with naming(aside), aside.open("ab") as kept:
            kept.writelines(damage)
            flush_through(kept)


def _partial(file: Path) -> Path:
    return file.with_name(f"{file.name}.partial")


def flush_through(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def flush_to_disk(path: Path) -> None:
    """Sync a file's content, or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(log: BinaryIO, run: Path) -> None:
    """Take the writer's lock, which ends with the process; raises an error if another process has it."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise _already_locked(run) from error


def _already_locked(run: Path) -> RollwrightError:
    return RollwrightError(f"{run}: another process is writing to this run")


def _is_current(opened: BinaryIO, file: Path) -> bool:
    """Whether the open file is still the file of that name."""
    return os.path.samestat(os.fstat(opened.fileno()), file.stat())
