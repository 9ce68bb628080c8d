"""Tensors in pieces over the files of a checkpoint, of which a rank reads only the rows that it holds.

Always true: a tensor is cut along its first dimension alone, and a file's metadata says with which row each of its pieces
begins. So files of any number of ranks, and files of whole tensors, are read in the same way by any number of ranks.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollwright.errors import FormatError
from rollwright.training.checkpoints import CheckpointManifest, save_tensors

FIRST_ROWS = "first_rows"
"""Key of a file's metadata: the first row of each piece, as JSON."""

GROUPS = ("model", "optimizer", "random")
"""Names of a checkpoint's files of whole tensors; in shards, of tensors before a slash."""


def shard_name(rank: int, size: int) -> str:
    """Name of a rank's file, without its suffix."""
    return f"shard-{rank:05d}-of-{size:05d}"


def save_shard(file: Path, pieces: Mapping[str, Tensor], first_rows: Mapping[str, int]) -> None:
    """Writes a rank's pieces; names are `group/tensor`."""
    save_tensors(file, pieces, {FIRST_ROWS: json.dumps(dict(first_rows))})


@dataclass(frozen=True)
class ShardPiece:
    """Rows of one tensor in one file."""

    file: Path
    key: str
    first: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.first + (self.shape[0] if self.shape else 1)


class TensorPieces:
    """The tensors of a checkpoint, read piece by piece. Files are opened for one read each."""

    def __init__(self, manifest: CheckpointManifest) -> None:
        self._pieces: dict[str, list[ShardPiece]] = {}
        for name in manifest.sums:
            for tensor, piece in _pieces_of(manifest, name):
                self._pieces.setdefault(tensor, []).append(piece)
        for tensor, pieces in self._pieces.items():
            pieces.sort(key=lambda each: each.first)
            ends = [0, *(each.end for each in pieces)]
            if any(each.first != end for each, end in zip(pieces, ends, strict=False)):
                raise FormatError(f"checkpoint {manifest.place}: rows of {tensor} are missing")

    def names(self, group: str) -> list[str]:
        """Names of the tensors of one of `GROUPS`."""
        return [each.removeprefix(f"{group}/") for each in self._pieces if each.startswith(f"{group}/")]

    def shape(self, group: str, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor."""
        pieces = self._pieces[f"{group}/{name}"]
        return (pieces[-1].end, *pieces[0].shape[1:]) if pieces[0].shape else ()

    def read(self, group: str, name: str, rows: range | None = None) -> Tensor:
        """These rows of a tensor; without `rows`, all of it."""
        pieces = self._pieces[f"{group}/{name}"]
        if not pieces[0].shape:
            return _read(pieces[0], None)
        wanted = range(pieces[-1].end) if rows is None else rows
        parts = [
            _read(
                each,
                slice(max(wanted.start, each.first) - each.first, min(wanted.stop, each.end) - each.first),
            )
            for each in pieces
            if max(wanted.start, each.first) < min(wanted.stop, each.end)
        ]
        if not parts:
            return torch.empty(0, *pieces[0].shape[1:])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def whole(self) -> dict[str, dict[str, Tensor]]:
        """All tensors by group and name."""
        found: dict[str, dict[str, Tensor]] = {group: {} for group in GROUPS}
        for each in self._pieces:
            group, name = each.split("/", 1)
            found[group][name] = self.read(group, name)
        return found


def _pieces_of(manifest: CheckpointManifest, name: str) -> list[tuple[str, ShardPiece]]:
    """Names and pieces of one file, from its header."""
    from safetensors import SafetensorError

    file, found = manifest.file(name), []
    try:
        with _opened(file) as opened:
            first_rows = json.loads((opened.metadata() or {}).get(FIRST_ROWS, "{}"))
            for key in opened.keys():  # noqa: SIM118 - an open file is no mapping
                shape = tuple(opened.get_slice(key).get_shape())
                tensor = key if manifest.sharded else f"{name}/{key}"
                found.append((tensor, ShardPiece(file, key, int(first_rows.get(key, 0)), shape)))
    except (OSError, ValueError, SafetensorError) as error:
        raise FormatError(f"checkpoint {manifest.place}: {file.name} cannot be read: {error}") from error
    return found


def _read(piece: ShardPiece, rows: slice | None) -> Tensor:
    with _opened(piece.file) as opened:
        found: Tensor = opened.get_tensor(piece.key) if rows is None else opened.get_slice(piece.key)[rows]
        return found


def _opened(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="pt")
