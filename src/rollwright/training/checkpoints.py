"""Checkpoints of the trainer, in folders that are written atomically.

Always true: at every moment one complete folder exists, and `find_complete` finds it. A folder is written under a
temporary name, flushed to disk and renamed; an existing one is first moved aside and removed last. Tensors are stored as
safetensors, everything else as JSON; nothing is pickled. A checkpoint has whole tensors in three files, or one file of each
rank with its shards (`shard_files`); `read_checkpoint` reads both.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from rollwright.errors import ConfigError, FormatError, RollwrightError, naming

FORMAT, SHARDED = 1, 2
"""Formats of whole tensors, and of one file of shards for each rank."""
STATE = "state.json"
_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Checkpoint:
    """State from which a trainer resumes bit for bit."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    """Tensors by file name and tensor name."""
    state: Mapping[str, Any]
    """Counters of the trainer."""
    extra: Mapping[str, Any]
    """Data of the caller, in JSON types."""


@dataclass(frozen=True)
class CheckpointManifest:
    """Content of `state.json`, without a look at the tensors."""

    place: Path
    """The complete folder."""
    sharded: bool
    state: Mapping[str, Any]
    extra: Mapping[str, Any]
    sums: Mapping[str, str]
    """SHA-256 of each file of tensors, by its name without the suffix."""

    def file(self, name: str) -> Path:
        return self.place / f"{name}.safetensors"

    def is_intact(self, name: str) -> bool:
        """Whether the file is there and as it was written."""
        return self.file(name).is_file() and sha256_of(self.file(name)) == self.sums[name]


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    def fill(place: Path) -> None:
        for name, tensors in checkpoint.tensors.items():
            save_tensors(place / f"{name}.safetensors", tensors)
        sums = {name: sha256_of(place / f"{name}.safetensors") for name in checkpoint.tensors}
        write_manifest(CheckpointManifest(place, False, checkpoint.state, checkpoint.extra, sums), folder)

    write_folder(folder, fill)


def write_manifest(manifest: CheckpointManifest, folder: Path) -> None:
    """Writes `state.json`. `folder`: where the checkpoint will be, for the error."""
    content = {
        "format": SHARDED if manifest.sharded else FORMAT,
        "state": dict(manifest.state),
        "extra": dict(manifest.extra),
        "sha256": dict(manifest.sums),
    }
    try:
        text = json.dumps({**content, "checksum": _checksum(content)}, indent=1)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"checkpoint {folder}: `extra` must be JSON: {error}") from error
    with naming(manifest.place / STATE):
        (manifest.place / STATE).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> CheckpointManifest:
    place = find_complete(folder)
    try:
        content = json.loads((place / STATE).read_text(encoding="utf-8"))
        if "checksum" in content and content.pop("checksum") != _checksum(content):
            raise ValueError("it is not as it was written")
        found = content["format"], content["state"], content["extra"], content["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"checkpoint {folder}: no readable {STATE}: {error}") from error
    format_version, state, extra, sums = found
    if format_version not in (FORMAT, SHARDED):
        raise FormatError(f"checkpoint {folder}: has format {format_version}; accepted: {FORMAT}, {SHARDED}")
    return CheckpointManifest(place, format_version == SHARDED, state, extra, sums)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads whole tensors, also of a checkpoint in shards."""
    from safetensors.torch import load_file

    manifest = read_manifest(folder)
    for name in manifest.sums:
        if not manifest.is_intact(name):
            raise damaged(folder, [name])
    if manifest.sharded:
        from rollwright.training.shard_files import TensorPieces

        return Checkpoint(TensorPieces(manifest).whole(), manifest.state, manifest.extra)
    tensors = {name: load_file(manifest.file(name)) for name in manifest.sums}
    return Checkpoint(tensors, manifest.state, manifest.extra)


def damaged(folder: Path, names: Sequence[str]) -> FormatError:
    """The error about files of a checkpoint that are missing or changed."""
    files = ", ".join(f"{name}.safetensors" for name in names)
    return FormatError(
        f"checkpoint {folder}: {files} {'are' if len(names) > 1 else 'is'} missing or not as it was written"
    )


def save_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] = _NONE) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, file, {"format": "pt", **metadata})
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
    partial = begin_folder(folder)
    fill(partial)
    for path in sorted(partial.rglob("*")):
        flush_to_disk(path)
    complete_folder(partial, folder)


def begin_folder(folder: Path, attempt: str = "") -> Path:
    """Makes the temporary folder, and removes those of attempts that were interrupted.

    `attempt`: sets it apart from one into which a lost process may still write.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for old in folder.parent.glob(f".{folder.name}.partial*"):
        shutil.rmtree(old, ignore_errors=True)
    partial = partial_folder(folder, attempt)
    partial.mkdir()
    return partial


def partial_folder(folder: Path, attempt: str = "") -> Path:
    return folder.with_name(f".{folder.name}.partial{attempt}")


def complete_folder(partial: Path, folder: Path) -> None:
    """Gives the temporary folder, whose files are on the disk, its name."""
    aside = _aside(folder)
    flush_to_disk(partial)
    if folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    partial.rename(folder)
    flush_to_disk(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def find_complete(folder: Path) -> Path:
    """Path of the folder's latest complete content, also after a crash while it was being replaced."""
    return _aside(folder) if not folder.exists() and _aside(folder).exists() else folder


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()
