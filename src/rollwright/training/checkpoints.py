"""Folders that are there whole or not at all, and the trainer's state in them.

A folder is filled under another name, flushed to the disk, and renamed. Where one of that name exists, it is moved
aside first and removed last, so that at every moment one whole folder is there: `whole` finds it. Tensors are kept as
safetensors, everything else as JSON; nothing is pickled.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from rollwright.errors import ConfigError, FormatError, RollwrightError, naming

FORMAT = 1
STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """What a trainer needs to go on as if nothing had happened."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    """By file, then by name."""
    state: Mapping[str, Any]
    """The trainer's own numbers."""
    extra: Mapping[str, Any]
    """The caller's, as it gave them."""


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    def fill(place: Path) -> None:
        for name, tensors in checkpoint.tensors.items():
            save_tensors(place / f"{name}.safetensors", tensors)
        content = {
            "format": FORMAT,
            "state": dict(checkpoint.state),
            "extra": dict(checkpoint.extra),
            "sha256": {name: _sha256(place / f"{name}.safetensors") for name in checkpoint.tensors},
        }
        try:
            text = json.dumps({**content, "checksum": _checksum(content)}, indent=1)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"checkpoint {folder}: `extra` must be JSON: {error}") from error
        with naming(place / STATE):
            (place / STATE).write_text(text + "\n", encoding="utf-8")

    write_folder(folder, fill)


def read_checkpoint(folder: Path) -> Checkpoint:
    from safetensors.torch import load_file

    place = whole(folder)
    try:
        content = json.loads((place / STATE).read_text(encoding="utf-8"))
        if "checksum" in content and content.pop("checksum") != _checksum(content):
            raise ValueError("it is not as it was written")
        found = content["format"], content["state"], content["extra"], content["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"checkpoint {folder}: no readable {STATE}: {error}") from error
    format_version, state, extra, sums = found
    if format_version != FORMAT:
        raise FormatError(f"checkpoint {folder}: has format {format_version}; accepted: {FORMAT}")
    tensors = {}
    for name, expected in sums.items():
        file = place / f"{name}.safetensors"
        if not file.is_file() or _sha256(file) != expected:
            raise FormatError(f"checkpoint {folder}: {file.name} is missing or not as it was written")
        tensors[name] = load_file(file)
    return Checkpoint(tensors, state, extra)


def save_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, file, {"format": "pt"})
    except SafetensorError as error:  # its only word for a full disk
        raise RollwrightError(f"{file}: cannot be written: {error}") from error


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Makes `folder` what `fill` writes into the place it is given; a folder of that name is replaced."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, aside = folder.with_name(f".{folder.name}.partial"), _aside(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    fill(partial)
    for path in (*sorted(partial.rglob("*")), partial):
        _flush(path)
    if folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    partial.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def whole(folder: Path) -> Path:
    """Where the folder's last whole content is, also after a crash while it was being replaced."""
    return _aside(folder) if not folder.exists() and _aside(folder).exists() else folder


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()
