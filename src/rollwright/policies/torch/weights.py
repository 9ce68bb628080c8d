"""New weights for a model: read, checked against it, and only then put in, so that a bad update changes nothing."""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rollwright.errors import ConfigError, FormatError
from rollwright.models.loading import weights_checksum, weights_files
from rollwright.policies.base import Weights

Tensors = Mapping[str, torch.Tensor]


def read_weights(model: PreTrainedModel, weights: Weights) -> Tensors:
    """The new tensors by name. Raises, in one line, when they are not this model's or not what was announced."""
    where = f"weights of version {weights.version}"
    if weights.tensors is not None:
        tensors: Tensors = weights.tensors
    elif weights.folder is not None:
        tensors = _read_folder(weights.folder, weights.checksum, where)
    else:
        raise ConfigError(f"{where}: hold neither a folder nor tensors; accepted: one of them")
    _check(model, tensors, where)
    return tensors


def put_weights(model: PreTrainedModel, tensors: Tensors) -> None:
    """In place: whoever holds the model sees the new weights at once."""
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name].copy_(tensor)


def _read_folder(folder: Path, checksum: str | None, where: str) -> Tensors:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if checksum is not None and (found := weights_checksum(folder)) != checksum:
        raise FormatError(
            f"{where}: {folder} has checksum {found[:12]}…, not the announced {checksum[:12]}…;"
            " the old weights stay"
        )
    tensors: dict[str, torch.Tensor] = {}
    for path in weights_files(folder):
        try:
            tensors.update(load_file(path))
        except SafetensorError as error:
            raise FormatError(f"{where}: {path} is not a whole safetensors file: {error}") from error
    return tensors


def _check(model: PreTrainedModel, tensors: Tensors, where: str) -> None:
    state = model.state_dict()
    if unknown := sorted(set(tensors) - set(state)):
        raise FormatError(f"{where}: {_some(unknown)} not in the model; accepted: its own names")
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise FormatError(
                f"{where}: {name} has shape {tuple(tensor.shape)}; accepted: {tuple(state[name].shape)}"
            )
    # one of several names for the same tensor is enough: input and output embeddings are often tied
    given = {state[name].data_ptr() for name in tensors}
    if missing := sorted(name for name, tensor in state.items() if tensor.data_ptr() not in given):
        raise FormatError(f"{where}: {_some(missing)} missing; accepted: all tensors of the model")


def _some(names: list[str]) -> str:
    more = len(names) - 1
    return f"{names[0]} and {more} more are" if more else f"{names[0]} is"
