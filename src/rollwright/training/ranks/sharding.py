"""A model's weights, gradients and optimiser state over ranks, by torch's own FSDP2.

Always true: gradients are summed over ranks, not averaged, because the coefficients of the loss cover the whole batch. With
`gather: once` the weights of an update are gathered once and its gradients reduced once, so passes communicate nothing, and
ranks may make different numbers of them. With `gather: every_pass` each pass gathers and reduces layer by layer, which
needs less memory, and ranks make equal numbers of passes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rollwright.errors import ConfigError
from rollwright.training.ranks.collective import Ranks
from rollwright.training.settings import TrainerSettings


class ShardedModule:
    """A module whose parameters are sharded in place."""

    def __init__(
        self, module: Any, layers: Sequence[nn.Module], settings: TrainerSettings, ranks: Ranks
    ) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        once = settings.gather == "once"
        mesh = _mesh(settings, ranks, next(module.parameters()).device.type)
        shard: Any = fully_shard
        for layer in layers:
            shard(layer, mesh=mesh, reshard_after_forward=not once)
        shard(module, mesh=mesh, reshard_after_forward=not once)
        self._module = module
        self._parts: list[Any] = [each for each in module.modules() if isinstance(each, FSDPModule)]
        for part in self._parts:
            # The first alone is not enough: gloo has no averaging, and is asked for it otherwise.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        if once:
            self._module.set_reshard_after_backward(False)
            self._module.set_requires_gradient_sync(False)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, every rank holds all weights."""
        for part in self._parts:
            part.unshard()
        try:
            yield
        finally:
            for part in self._parts:
                part.reshard()

    def reduce(self, touch: Callable[[], None]) -> None:
        """Sums up the gradients of all ranks; `touch` makes one more pass, backwards too, with gradient 0."""
        self._module.set_requires_gradient_sync(True)
        try:
            touch()
        finally:
            self._module.set_requires_gradient_sync(False)


def _mesh(settings: TrainerSettings, ranks: Ranks, device: str) -> Any:
    from torch.distributed import new_subgroups_by_enumeration
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if settings.sharding == "full":
        return init_device_mesh(device, (ranks.size,))
    shard = 1 if settings.sharding == "replicate" else settings.shard_ranks
    if ranks.size % shard:
        raise ConfigError(
            f"training.shard_ranks: {shard} does not divide training.processes, which is {ranks.size}"
        )
    rows = [list(range(first, first + shard)) for first in range(0, ranks.size, shard)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    # A mesh that makes its own groups gives them torch's time limit, half an hour, in which a stopped rank is not noticed.
    limit = timedelta(seconds=settings.rank_timeout)
    make_groups: Any = new_subgroups_by_enumeration  # torch declares no types for it
    groups = [make_groups(each, timeout=limit)[0] for each in (columns, rows)]
    return DeviceMesh.from_group(groups, device, torch.tensor(rows), mesh_dim_names=("replicate", "shard"))


def decoder_layers(model: Any) -> list[nn.Module]:
    """The layers of a transformers model, each of which is gathered by itself."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [each for each in model.modules() if type(each).__name__ in names]


def checkpoint_activations(layers: Sequence[nn.Module]) -> None:
    """Keeps only the inputs of each layer for the backward pass, which computes the rest again."""
    from torch.utils.checkpoint import checkpoint

    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded. All ranks have to call this, in the same order."""
    whole = getattr(tensor, "full_tensor", None)
    return tensor.detach() if whole is None else whole().detach()


def like(tensor: Tensor, value: Tensor | None, ranks: Ranks) -> Tensor:
    """`value`, sharded as `tensor` is; only rank 0 has to know it. All ranks have to call this, in the same order."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return ranks.from_first(tensor, value)
    from torch.distributed.tensor import distribute_tensor

    whole = torch.empty(tensor.shape, dtype=tensor.dtype) if value is None else value.to(tensor.dtype)
    return distribute_tensor(whole.to(tensor.device), mesh, tensor.placements)  # type: ignore[attr-defined]


def own_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's part of a tensor that may be sharded, and its first row in the whole one."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tensor, 0
    share = -(
        -tensor.shape[0] // mesh.size(mesh.ndim - 1)
    )  # as torch's `chunk`: the last ranks may have less, or nothing
    first = min(mesh.get_local_rank(mesh.ndim - 1) * share, tensor.shape[0])
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    if len(local) != min(share, tensor.shape[0] - first):
        raise RuntimeError(f"a shard has {len(local)} rows, not {min(share, tensor.shape[0] - first)}")
    return local, first


def is_kept_here(tensor: Tensor, ranks: Ranks) -> bool:
    """Whether this rank is the first of those that hold the same part of a tensor."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return ranks.rank == 0
    return bool(mesh.ndim == 1 or mesh.get_local_rank(0) == 0)


def sharded_like(tensor: Tensor, local: Tensor) -> Tensor:
    """A tensor of which this rank has the part `local`, sharded as `tensor` is. Nothing is communicated."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        mesh,
        tensor.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
