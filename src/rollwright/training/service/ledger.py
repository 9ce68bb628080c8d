"""The fate of each batch, on disk: the trainer that has it, and the weights that came back for it.

Always true: a line is on disk before its call is answered. So a run that is killed at any moment offers again only batches
that were not acknowledged, and still accepts the weights of a trainer that was working meanwhile. A partial last line belongs
to a call that was never answered.
"""

import os
from pathlib import Path

import msgspec

from rollwright.errors import FormatError, naming


class Finish(msgspec.Struct, frozen=True, tag="finish", omit_defaults=True):
    """One acknowledged batch."""

    step: int
    lease: str
    version: int
    """Version of the weights after it."""
    folder: str | None = None
    """Folder of these weights; `None`: the batch was skipped, and they are those before it."""
    checksum: str | None = None
    skipped: str | None = None
    metrics: dict[str, float] = {}


class HandOut(msgspec.Struct, frozen=True, tag="lease"):
    """One batch, handed to one trainer."""

    step: int
    lease: str
    trainer: str


_decode = msgspec.json.Decoder(Finish | HandOut).decode


class ServedLedger:
    """`training/served.jsonl` of a run folder."""

    def __init__(self, file: Path) -> None:
        self.finished: dict[int, Finish] = {}
        self.handed: dict[int, HandOut] = {}
        """The last hand-out of each batch."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._path = file
        whole = self._read()
        self._file = file.open("ab")
        self._file.truncate(whole)

    def append(self, line: Finish | HandOut) -> None:
        """Returns when the line is on the disk."""
        with naming(self._path):
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self._add(line)

    def close(self) -> None:
        self._file.close()

    def _add(self, line: Finish | HandOut) -> None:
        if isinstance(line, Finish):
            self.finished[line.step] = line
        else:
            self.handed[line.step] = line

    def _read(self) -> int:
        """Reads all whole lines; returns their length in bytes."""
        content = self._path.read_bytes() if self._path.exists() else b""
        whole = content.rpartition(b"\n")[0]
        for number, line in enumerate(whole.split(b"\n") if whole else (), 1):
            try:
                self._add(_decode(line))
            except msgspec.MsgspecError as error:
                raise FormatError(f"{self._path}: line {number} cannot be read: {error}") from error
        return len(whole) + 1 if whole else 0
