"""The log of a run's finished trajectories: records, each with its length and checksum before it.

Always true: as in `log_records`. Only what a crash left half written at the end is ever cut off; damaged bytes are kept
aside, beside the log. One process at a time writes.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rollwright.errors import RollwrightError, naming
from rollwright.run.log_records import FRAME, HEAD, LogCondition, decoded, framed, records

TRAJECTORIES = "trajectories.rwlog"
DAMAGED = f"{TRAJECTORIES}.damaged"
"""Bytes that are no records any more, in the order in which they were found."""


class Place(NamedTuple):
    """Where an encoded trajectory is in the log."""

    start: int
    size: int


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
        self._places[rollout_id] = Place(self._end + FRAME.size, len(encoded))
        self._end += FRAME.size + len(encoded)

    def read(self, rollout_ids: Iterable[str]) -> dict[str, bytes]:
        """Those of them that it has, and can read."""
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
                        copy.places[rollout_id] = Place(written + FRAME.size, len(encoded))
                        written += FRAME.size + len(encoded)
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
