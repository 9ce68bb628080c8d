"""One run's folder: the configuration as used, every finished trajectory, metrics, failures, the summary.

Always true: what was written stays readable. Trajectories are appended as length- and checksum-framed records,
so a crash can cost at most the record that was being written, and reading stops there and says so.
"""

import fcntl
import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from rollwright.config import RunConfig, build, dump
from rollwright.errors import FormatError, RollwrightError
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
        written = {each.rollout_id for each in reader.trajectories()}
        log.truncate(reader.whole_bytes)
        log.seek(0, 2)
        for name in (METRICS, FAILURES):
            _cut_half_line(path / name)
        written.update(row["rollout_id"] for row in reader.failures())
        return cls(path, log, written)

    def keep_settings(self, config: RunConfig) -> None:
        """Writes down what the run is played with from now on."""
        partial = self.path / f"{CONFIG}.partial"
        partial.write_text(dump(config), encoding="utf-8")
        partial.replace(self.path / CONFIG)

    def store_address(self, told: str | None) -> str:
        """Where the run's rollouts are: what it is told, what it was told before, or its own file.

        What it is told is remembered without its password.
        """
        remembered = self.path / ADDRESS
        if told is not None:
            remembered.write_text(_without_password(told) + "\n", encoding="utf-8")
            return told
        return (
            remembered.read_text(encoding="utf-8").strip() if remembered.is_file() else str(self.path / STORE)
        )

    def add_trajectory(self, rollout_id: str, encoded: bytes) -> None:
        """Adds it once, however often it is given."""
        if rollout_id in self._written:
            return
        self._written.add(rollout_id)
        self._log.write(_FRAME.pack(len(encoded), zlib.crc32(encoded)) + encoded)

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

    def finish(self, summary: Mapping[str, Any]) -> None:
        partial = self.path / f"{SUMMARY}.partial"
        partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.path / SUMMARY)
        self._log.close()

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _lock(log: BinaryIO, path: Path) -> None:
    """One writer at a time; the lock goes with the process."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise RollwrightError(f"{path}: another process is writing to this run") from error


def _without_password(address: str) -> str:
    return re.sub(r"(://[^:/@]+):[^@]*@", r"\1@", address)


def _cut_half_line(file: Path) -> None:
    if file.is_file():
        content = file.read_bytes()
        file.write_bytes(content[: content.rfind(b"\n") + 1])


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

    def metrics(self) -> list[dict[str, Any]]:
        return self._rows(METRICS)

    def failures(self) -> list[dict[str, Any]]:
        return self._rows(FAILURES)

    def trajectories(self) -> Iterator[Trajectory]:
        """All finished trajectories, in the order they were finished."""
        with (self.path / TRAJECTORIES).open("rb") as file:
            if file.read(len(_HEAD)) != _HEAD:
                raise FormatError(f"{self.path / TRAJECTORIES}: is not a trajectory log of this release")
            while head := file.read(_FRAME.size):
                if len(head) < _FRAME.size:
                    break
                size, checksum = _FRAME.unpack(head)
                encoded = file.read(size)
                if len(encoded) < size or zlib.crc32(encoded) != checksum:
                    break
                self.whole_bytes = file.tell()
                yield Trajectory.from_bytes(encoded)
            else:
                return
        self.cut_off = True

    def _rows(self, name: str) -> list[dict[str, Any]]:
        file = self.path / name
        if not file.is_file():
            return []
        whole = file.read_text(encoding="utf-8").rpartition("\n")[0]  # a crash may have cut the last line
        return [json.loads(line) for line in whole.splitlines() if line.strip()]
