"""Checkpoints of the trainer, in folders that are written atomically.

Always true: at every moment one complete folder exists, and `find_complete` finds it. A folder is written under a
temporary name, flushed to disk and renamed; an existing one is first moved aside and removed last. Tensors are stored as
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
    """State from which a trainer resumes bit for bit."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    """Tensors by file name and tensor name."""
    state: Mapping[str, Any]
    """Counters of the trainer."""
    extra: Mapping[str, Any]
    """Data of the caller, in JSON types."""


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

    place = find_complete(folder)
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

    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, file, {"format": "pt"})
    except SafetensorError as error:  # raised for a full disk, too
        raise RollwrightError(f"{file}: cannot be written: {error}") from error


def save_model_tensors(place: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a model's weights as transformers does: one file, or several of at most `MODEL_FILE_BYTES` with an index."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        own = tensor.numel() * tensor.element_size()
        if parts[-1] and size + own > MODEL_FILE_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += own
    if len(parts) == 1:
        save_tensors(place / "model.safetensors", tensors)
        return
    where: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_tensors(place / file, part)
        where |= dict.fromkeys(part, file)
    total = sum(each.numel() * each.element_size() for each in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    with naming(place / MODEL_INDEX):
        (place / MODEL_INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


MODEL_FILE_BYTES = 5_000_000_000
"""Largest file of an exported model, as in transformers: engines read files in parallel, and some file systems have limits."""
MODEL_INDEX = "model.safetensors.index.json"


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Writes a folder atomically: `fill` writes into a temporary one. An existing folder is replaced."""
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


def find_complete(folder: Path) -> Path:
    """Path of the folder's latest complete content, also after a crash while it was being replaced."""
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
