"""One run's folder: the configuration as used, every finished trajectory, metrics, failures, the summary.

Always true: what was written stays readable, until the run forgets it (`retention`): then no reader shows it any more,
removed or not. Trajectories are appended as length- and checksum-framed records, so a crash can cost at most the record
that was being written, and reading stops there and says so. One process at a time writes.
"""

import fcntl
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from rollwright.addresses import without_password
from rollwright.config import RunConfig, build, dump
from rollwright.errors import FormatError, RollwrightError
from rollwright.run.retention import Forgotten, flush_to_disk, read_forgotten, replace_durably
from rollwright.trajectory import Trajectory

_HEAD = b"RWLOG\x01\n"
_FRAME = struct.Struct("<II")
"""Length and CRC-32 of the record that follows."""

CONFIG, TRAJECTORIES, METRICS, FAILURES, SUMMARY, STORE, ADDRESS = (
    "config.yaml",
    "trajectories.rwlog",
    "metrics.jsonl",
    "failures.jsonl",
    "summary.json",
    "store.db",
    "store.address",
)


class RunFolder:
    """A folder being written."""

    def __init__(self, path: Path, log: BinaryIO, written: set[str]) -> None:
        self.path = path
        self._log = log
        self._written = written
        """Rollouts whose trajectories are in the log, or whose failures are told."""

    @classmethod
    def create(cls, runs: Path, config: RunConfig) -> tuple["RunFolder", RunConfig]:
        """`runs/NAME`, or with a number behind it when that exists: no run overwrites another.

        Also gives the configuration with the name that the run has now.
        """
        name, number = config.name, 2
        while (runs / name).exists():
            name = f"{config.name}-{number}"
            number += 1
        config = config.model_copy(update={"name": name})
        return cls.begin(runs / name, config), config

    @classmethod
    def begin(cls, path: Path, config: RunConfig) -> "RunFolder":
        """A new run in this very folder, which may exist but must not be a run."""
        path.mkdir(parents=True, exist_ok=True)
        if (path / CONFIG).exists():
            raise RollwrightError(f"{path}: is a run already")
        log = (path / TRAJECTORIES).open("wb")
        _lock(log, path)
        log.write(_HEAD)
        log.flush()
        folder = cls(path, log, set())
        folder.keep_settings(config)  # last: with it the folder is a run
        return folder

    @classmethod
    def reopen(cls, path: Path) -> "RunFolder":
        """Goes on with a folder; what a crash left half written is cut off."""
        reader = RunReader(path)
        log = (path / TRAJECTORIES).open("r+b")
        _lock(log, path)
        if not _is_at(log, path / TRAJECTORIES):  # its writer has just put another in its place
            raise _taken(path)
        written = {each.rollout_id for each in reader.trajectories()}
        log.truncate(reader.whole_bytes)
        log.seek(0, 2)
        for name in (METRICS, FAILURES):
            _cut_half_line(path / name)
        written.update(row["rollout_id"] for row in reader.failures())
        folder = cls(path, log, written)
        if reader.forgotten().steps:  # it may have been killed while it removed what is forgotten
            folder.remove(folder.copy_kept(reader.forgotten()))
        return folder

    def keep_settings(self, config: RunConfig) -> None:
        """Writes down what the run is played with from now on."""
        partial = self.path / f"{CONFIG}.partial"
        partial.write_text(dump(config), encoding="utf-8")
        partial.replace(self.path / CONFIG)

    def store_address(self, told: str | None) -> str:
        """Where the run's rollouts are: what it is told, what it was told before, or its own file.

        What it is told is remembered without its password; whoever goes on with the run gives it again, best by
        PGPASSWORD.
        """
        remembered = self.path / ADDRESS
        if told is not None:
            remembered.write_text(without_password(told) + "\n", encoding="utf-8")
            return told
        return (
            remembered.read_text(encoding="utf-8").strip() if remembered.is_file() else str(self.path / STORE)
        )

    def add_trajectory(self, rollout_id: str, encoded: bytes) -> None:
        """Adds it once, however often it is given."""
        if rollout_id in self._written:
            return
        self._written.add(rollout_id)
        self._log.write(_framed(encoded))

    def trajectories(self) -> Iterator[Trajectory]:
        """All that were added so far."""
        self._log.flush()
        return RunReader(self.path).trajectories()

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        """Makes a batch known as handed out; the trajectories are on disk before it is."""
        self._log.flush()
        self._append(METRICS, row)

    def add_failure(self, rollout_id: str, reason: str) -> None:
        """Adds it once, however often it is given."""
        if rollout_id in self._written:
            return
        self._written.add(rollout_id)
        self._append(FAILURES, {"rollout_id": rollout_id, "reason": reason})

    def copy_kept(self, forgotten: Forgotten) -> "KeptLog":
        """The first half of removing what is forgotten: a copy of the log without it, beside it. Other threads may write
        to the folder meanwhile."""
        self._log.flush()
        rows = RunReader(self.path).metrics()
        return KeptLog.copy(self.path, forgotten, {group for row in rows for group in row["groups"]})

    def remove(self, kept: "KeptLog") -> None:
        """The second half, which is quick: everything in the folder is then without what is forgotten."""
        self._log.flush()
        log = kept.put_in_place()
        self._log.close()
        self._log = log
        self._written = {each for each in self._written if not kept.leaves_out(each)}
        for name, is_forgotten in (
            (METRICS, kept.forgotten.has_row),
            (FAILURES, lambda row: kept.forgotten.has_rollout(row["rollout_id"])),
        ):
            _remove_lines(self.path / name, is_forgotten)

    def finish(self, summary: Mapping[str, Any]) -> None:
        partial = self.path / f"{SUMMARY}.partial"
        partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.path / SUMMARY)
        self._log.close()

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


class KeptLog:
    """A copy of a run's log without what is forgotten, which is to take its place."""

    def __init__(
        self, path: Path, forgotten: Forgotten, recorded: Collection[str], partial: BinaryIO, end: int
    ) -> None:
        self._path = path
        self.forgotten = forgotten
        self._recorded = recorded
        self._partial = partial
        self._end = end
        """Up to where the log was copied."""

    @classmethod
    def copy(cls, path: Path, forgotten: Forgotten, recorded: Collection[str]) -> "KeptLog":
        """`recorded`: the groups that stand in the record."""
        partial = (path / f"{TRAJECTORIES}.partial").open("w+b")
        kept = cls(path, forgotten, recorded, partial, len(_HEAD))
        partial.write(_HEAD)
        with (path / TRAJECTORIES).open("rb") as log:
            for encoded in _records(log):
                kept._end = log.tell()
                if not kept.leaves_out(Trajectory.from_bytes(encoded).rollout_id):
                    partial.write(_framed(encoded))
        _flush(partial)
        return kept

    def leaves_out(self, rollout_id: str) -> bool:
        """What is forgotten, and what others have played that came into no batch, because the run was killed."""
        group_id = rollout_id.rpartition("-m")[0]
        foreign = not group_id.startswith(f"{self.forgotten.name}.")
        return self.forgotten.has_group(group_id) or (foreign and group_id not in self._recorded)

    def put_in_place(self) -> BinaryIO:
        """With what was written to the log since. Gives the new log, locked."""
        with (self._path / TRAJECTORIES).open("rb") as log:
            log.seek(self._end)
            shutil.copyfileobj(log, self._partial)
        _flush(self._partial)
        _lock(self._partial, self._path)
        (self._path / f"{TRAJECTORIES}.partial").replace(self._path / TRAJECTORIES)
        flush_to_disk(self._path)
        return self._partial


def _records(log: BinaryIO) -> Iterator[bytes]:
    """The whole records of a log from where it stands, up to its end or to one that is incomplete."""
    if log.read(len(_HEAD)) != _HEAD:
        raise FormatError(f"{log.name}: is not a trajectory log of this release")
    while len(head := log.read(_FRAME.size)) == _FRAME.size:
        size, checksum = _FRAME.unpack(head)
        encoded = log.read(size)
        if len(encoded) < size or zlib.crc32(encoded) != checksum:
            return
        yield encoded


def _framed(encoded: bytes) -> bytes:
    return _FRAME.pack(len(encoded), zlib.crc32(encoded)) + encoded


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _lock(log: BinaryIO, path: Path) -> None:
    """One writer at a time; the lock goes with the process."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise _taken(path) from error


def _taken(path: Path) -> RollwrightError:
    return RollwrightError(f"{path}: another process is writing to this run")


def _is_at(opened: BinaryIO, file: Path) -> bool:
    """Whether the file that is open is still the one of that name."""
    return os.path.samestat(os.fstat(opened.fileno()), file.stat())


def _cut_half_line(file: Path) -> None:
    if file.is_file():
        content = file.read_bytes()
        file.write_bytes(content[: content.rfind(b"\n") + 1])


def _remove_lines(file: Path, is_forgotten: Callable[[dict[str, Any]], bool]) -> None:
    if file.is_file():
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if not is_forgotten(json.loads(line))]
        if len(kept) < len(lines):
            replace_durably(file, "".join(kept))


class RunReader:
    """A folder being looked at."""

    def __init__(self, path: Path) -> None:
        if not (path / CONFIG).is_file():
            raise RollwrightError(f"{path}: is not a run folder; one has a {CONFIG}")
        self.path = path
        self.cut_off = False
        """Whether the last record read was incomplete."""
        self.whole_bytes = len(_HEAD)
        """Length of the trajectory log up to the last whole record read."""

    @property
    def config(self) -> RunConfig:
        return build(
            yaml.safe_load((self.path / CONFIG).read_text(encoding="utf-8")), source=str(self.path / CONFIG)
        )

    def summary(self) -> dict[str, Any] | None:
        """`None` when the run has not ended."""
        file = self.path / SUMMARY
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    @property
    def ended(self) -> bool:
        """Whether the run came to its own end, neither interrupted nor by an error: there is nothing to go on with."""
        summary = self.summary()
        return summary is not None and not summary["interrupted"] and summary["error"] is None

    def forgotten(self) -> Forgotten:
        """What is not shown any more."""
        return read_forgotten(self.path)

    def shown_steps(self) -> str | None:
        """Which steps there are to show, where it is not all of them."""
        if not (first := self.forgotten().steps):
            return None
        steps = [row["step"] for row in self.metrics() if row["mode"] == "train"]
        return f"steps {first}…{max(steps, default=first)}; earlier ones were forgotten (training.keep_steps)"

    def metrics(self) -> list[dict[str, Any]]:
        forgotten = self.forgotten()
        return [row for row in self._rows(METRICS) if not forgotten.has_row(row)]

    def failures(self) -> list[dict[str, Any]]:
        forgotten = self.forgotten()
        return [row for row in self._rows(FAILURES) if not forgotten.has_rollout(row["rollout_id"])]

    def trajectories(self) -> Iterator[Trajectory]:
        """All finished trajectories that are not forgotten, in the order they were finished."""
        forgotten = self.forgotten()
        self.whole_bytes = len(_HEAD)
        with (self.path / TRAJECTORIES).open("rb") as file:
            for encoded in _records(file):
                self.whole_bytes = file.tell()
                trajectory = Trajectory.from_bytes(encoded)
                if not forgotten.has_group(trajectory.group_id):
                    yield trajectory
            self.cut_off = file.tell() > self.whole_bytes

    def _rows(self, name: str) -> list[dict[str, Any]]:
        file = self.path / name
        if not file.is_file():
            return []
        whole = file.read_text(encoding="utf-8").rpartition("\n")[0]  # a crash may have cut the last line
        return [json.loads(line) for line in whole.splitlines() if line.strip()]
