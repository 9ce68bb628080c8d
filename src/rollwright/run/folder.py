"""One run's folder: the configuration as used, every finished trajectory, metrics, failures, the summary.

Always true: what was written stays readable. Trajectories are appended as length- and checksum-framed records,
so a crash can cost at most the record that was being written, and reading stops there and says so.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rollwright.config import RunConfig, build, dump
from rollwright.errors import FormatError, RollwrightError
from rollwright.trajectory import Trajectory

_HEAD = b"RWLOG\x01\n"
_FRAME = struct.Struct("<II")
"""Length and CRC-32 of the record that follows."""

CONFIG, TRAJECTORIES, METRICS, FAILURES, SUMMARY = (
    "config.yaml",
    "trajectories.rwlog",
    "metrics.jsonl",
    "failures.jsonl",
    "summary.json",
)


class RunFolder:
    """A folder being written."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.path = path
        path.mkdir(parents=True)
        (path / CONFIG).write_text(dump(config), encoding="utf-8")
        self._trajectories: BinaryIO = (path / TRAJECTORIES).open("wb")
        self._trajectories.write(_HEAD)

    @classmethod
    def create(cls, runs: Path, config: RunConfig) -> "RunFolder":
        """`runs/NAME`, or with a number behind it when that exists: no run overwrites another."""
        path = runs / config.name
        number = 2
        while path.exists():
            path = runs / f"{config.name}-{number}"
            number += 1
        return cls(path, config)

    def add_trajectory(self, encoded: bytes) -> None:
        self._trajectories.write(_FRAME.pack(len(encoded), zlib.crc32(encoded)))
        self._trajectories.write(encoded)

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        self._trajectories.flush()
        self._append(METRICS, row)

    def add_failure(self, rollout_id: str, reason: str) -> None:
        self._append(FAILURES, {"rollout_id": rollout_id, "reason": reason})

    def finish(self, summary: Mapping[str, Any]) -> None:
        (self.path / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        self._trajectories.close()

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


class RunReader:
    """A folder being looked at."""

    def __init__(self, path: Path) -> None:
        if not (path / CONFIG).is_file():
            raise RollwrightError(f"{path}: is not a run folder; one has a {CONFIG}")
        self.path = path
        self.cut_off = False
        """Whether the last record read was incomplete."""

    @property
    def config(self) -> RunConfig:
        import yaml

        return build(
            yaml.safe_load((self.path / CONFIG).read_text(encoding="utf-8")), source=str(self.path / CONFIG)
        )

    def summary(self) -> dict[str, Any] | None:
        """`None` when the run has not ended."""
        file = self.path / SUMMARY
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

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
                yield Trajectory.from_bytes(encoded)
            else:
                return
        self.cut_off = True

    def _rows(self, name: str) -> list[dict[str, Any]]:
        file = self.path / name
        if not file.is_file():
            return []
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
