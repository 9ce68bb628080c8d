"""What training changes: parameters and optimiser moments by name, over all ranks.

Always true: a state that was written on one number of ranks is read on any other. Whole: rank 0 gathers or knows all tensors,
and the other ranks need no files. In shards: every rank writes and reads its own rows, in a folder that all ranks share, and no
rank holds more than its part. Ranks agree on every outcome before they go on; a folder gets its name when all files are there.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rollwright.errors import FormatError, RollwrightError, naming
from rollwright.training.checkpoints import (
    STATE,
    Checkpoint,
    CheckpointManifest,
    begin_folder,
    complete_folder,
    damaged,
    flush_to_disk,
    partial_folder,
    read_checkpoint,
    sha256_of,
    write_checkpoint,
    write_manifest,
)
from rollwright.training.ranks.collective import Ranks
from rollwright.training.ranks.sharding import full, is_kept_here, like, own_rows, sharded_like
from rollwright.training.shard_files import TensorPieces, save_shard, shard_name

_T = TypeVar("_T")
SHARED_SECONDS = 30.0
"""Seconds until a folder that another machine made is seen: network file systems keep what they know of folders that long."""


class TrainedState:
    """Parameters and optimiser of this rank. All ranks call the same methods in the same order."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, ranks: Ranks
    ) -> None:
        self._parameters, self._optimizer, self._ranks = parameters, optimizer, ranks

    def write_whole(self, folder: Path, state: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Gathers all shards; rank 0 writes them as whole tensors."""
        parameters: dict[str, Tensor] = {}
        moments: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            _keep(parameters, name, full(parameter), self._ranks)
        for name, value in self._moments().items():
            _keep(moments, name, full(value), self._ranks)
        if not self._ranks.rank:
            tensors = {"model": parameters, "optimizer": moments, "random": _random_states()}
            write_checkpoint(folder, Checkpoint(tensors, state, extra))

    def write_shards(self, folder: Path, state: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Every rank writes its own shards; rank 0 adds the state and gives the folder its name."""
        ranks = self._ranks
        attempt = ranks.sums([0.0 if ranks.rank else float(secrets.randbelow(1 << 50))])[0]
        place = partial_folder(folder, f"-{int(attempt):x}")
        name = shard_name(ranks.rank, ranks.size)
        self._agreed(lambda: None if ranks.rank else _begin(folder, f"-{int(attempt):x}"))
        own = self._agreed(lambda: self._write_own(place, name))
        sums = {
            shard_name(rank, ranks.size): each.hex()
            for rank, each in enumerate(ranks.bytes_of_all(own))
            if any(each)
        }
        if not ranks.rank:
            # The last act of the call: a rank that is lost later does not make it be repeated.
            _finish(place, folder, state, extra, sums)

    def _write_own(self, place: Path, name: str) -> bytes:
        """Digest of this rank's file; zeros if it has none, because other ranks hold copies of all its rows."""
        ranks = self._ranks
        pieces = {f"model/{each}": value.detach() for each, value in self._parameters.items()}
        pieces |= {f"optimizer/{each}": value for each, value in self._moments().items()}
        kept = {each: own_rows(value) for each, value in pieces.items() if is_kept_here(value, ranks)}
        tensors = {each: local for each, (local, _) in kept.items() if local.numel()}
        if not ranks.rank:
            tensors |= {f"random/{each}": value for each, value in _random_states().items()}
        if not tensors:
            return bytes(32)
        if not _is_seen(place):
            raise RollwrightError(
                f"{place.parent}: the folder for a checkpoint in shards is not there for rank {ranks.rank}; all ranks "
                "need the run's folder under the same path, or `training.checkpoint_layout: whole`"
            )
        file = place / f"{name}.safetensors"
        first_rows = {each: first for each, (_, first) in kept.items() if first and each in tensors}
        with naming(file):
            save_shard(file, tensors, first_rows)
            flush_to_disk(file)
            return bytes.fromhex(sha256_of(file))

    def read_whole(self, folder: Path) -> Checkpoint:
        """Whole tensors of a checkpoint, which are those of this model."""
        checkpoint = read_checkpoint(folder)
        saved = checkpoint.tensors["model"]
        self._check(folder, {name: tuple(each.shape) for name, each in saved.items()})
        return checkpoint

    def take_whole(
        self, parameters: Mapping[str, Tensor | None], moments: Mapping[str, Tensor | None]
    ) -> None:
        """Takes tensors over. Ranks other than 0 need the names alone, except of single numbers among the moments."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(like(parameter, parameters[name], self._ranks))
        self._optimizer.state.clear()
        for entry, value in moments.items():
            key, name = entry.split(".", 1)
            parameter = self._parameters[name]
            single = value is not None and value.dim() == 0 and parameter.dim() > 0
            self._optimizer.state[parameter][key] = (
                value.to(parameter.device)
                if single and value is not None
                else like(parameter, value, self._ranks)
            )

    def take_shards(self, folder: Path, manifest: CheckpointManifest) -> None:
        """Takes over a checkpoint of which every rank reads its own rows. Damage is found before anything is changed."""
        self._check_files(folder, manifest)
        pieces = self._agreed(lambda: TensorPieces(manifest))
        self._check(folder, {name: pieces.shape("model", name) for name in pieces.names("model")})
        self._agreed(lambda: self._take_own(pieces))

    def _check_files(self, folder: Path, manifest: CheckpointManifest) -> None:
        """Raises an error on all ranks if a file is damaged; each rank looks at some of the files."""
        ranks, names = self._ranks, list(manifest.sums)
        mine = names[ranks.rank :: ranks.size]

        def look() -> list[float]:
            if ranks.rank and not _is_seen(manifest.place / STATE):
                raise RollwrightError(
                    f"checkpoint {folder}: is not there for rank {ranks.rank}; all ranks need the run's folder under the "
                    "same path to read shards"
                )
            return [float(name in mine and not manifest.is_intact(name)) for name in names]

        found = ranks.maxima([0.0, *self._agreed(look)])[1:]
        if bad := [name for name, is_bad in zip(names, found, strict=True) if is_bad]:
            raise damaged(folder, bad)

    def _take_own(self, pieces: TensorPieces) -> None:
        self._optimizer.state.clear()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                local, first = own_rows(parameter)
                rows = range(first, first + len(local)) if local.dim() else None
                local.copy_(pieces.read("model", name, rows))
        for entry in pieces.names("optimizer"):
            key, name = entry.split(".", 1)
            parameter = self._parameters[name]
            local, first = own_rows(parameter)
            if not pieces.shape("optimizer", entry):
                value = pieces.read("optimizer", entry).to(parameter.device)
            else:
                rows = range(first, first + len(local))
                found = pieces.read("optimizer", entry, rows).to(local.device, local.dtype)
                value = sharded_like(parameter, found.reshape(local.shape))
            self._optimizer.state[parameter][key] = value
        if self._ranks.size == 1:
            restore_random_states({name: pieces.read("random", name) for name in pieces.names("random")})

    def _moments(self) -> dict[str, Tensor]:
        """The optimiser's tensors by their names and those of their parameters."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        return {
            f"{key}.{names[id(trained)]}": value
            for trained, own in self._optimizer.state.items()
            for key, value in own.items()
        }

    def _check(self, folder: Path, saved: Mapping[str, tuple[int, ...]]) -> None:
        if dict(saved) != {name: tuple(each.shape) for name, each in self._parameters.items()}:
            raise FormatError(
                f"checkpoint {folder}: is of another model or other adapters; "
                "accepted: one that was saved with the same base model and the same `lora` and `critic`"
            )

    def _agreed(self, act: Callable[[], _T]) -> _T:
        """The result of `act`; if it raises on any rank, an error on all of them."""
        error: Exception | None = None
        try:
            result = act()
        except (RollwrightError, OSError, RuntimeError, MemoryError) as caught:
            error = caught
        self._ranks.agree(error)
        return result


def _begin(folder: Path, attempt: str) -> None:
    with naming(folder):
        begin_folder(folder, attempt)


def _finish(
    place: Path, folder: Path, state: Mapping[str, Any], extra: Mapping[str, Any], sums: Mapping[str, str]
) -> None:
    manifest = CheckpointManifest(place, True, state, extra, sums)
    for name in sums:
        if not _is_seen(manifest.file(name)):
            raise RollwrightError(
                f"{folder}: {name}.safetensors of another rank is not there; checkpoints in shards need a folder that all "
                "ranks share"
            )
    write_manifest(manifest, folder)
    flush_to_disk(place / STATE)
    with naming(folder):
        complete_folder(place, folder)


def _is_seen(path: Path) -> bool:
    """Whether a path exists; waits for what another machine has just made."""
    end = time.monotonic() + SHARED_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _keep(found: dict[str, Tensor], name: str, value: Tensor, ranks: Ranks) -> None:
    if ranks.rank == 0:
        found[name] = value


def _random_states() -> dict[str, Tensor]:
    """States of torch's global generators. Only models with random layers use them; the trainer itself does not."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda.{place}": state for place, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_random_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    for place in range(torch.cuda.device_count()):
        if f"cuda.{place}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{place}"], place)
