"""A checksum of a model folder's weights: SHA-256 of its safetensors files, one after the other, by name.

For a folder with a single file it is that file's own SHA-256.
"""

from hashlib import sha256
from pathlib import Path

from rollwright.errors import FormatError

_CHUNK = 1 << 20
"""Bytes read at a time: large files never lie in memory whole."""


def weights_files(folder: Path) -> list[Path]:
    """The folder's safetensors files in order; a `FormatError` when there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FormatError(
            f"{folder}: holds no *.safetensors; accepted: a folder as transformers saves a model"
        )
    return files


def weights_checksum(folder: Path) -> str:
    total = sha256()
    for path in weights_files(folder):
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                total.update(chunk)
    return total.hexdigest()
