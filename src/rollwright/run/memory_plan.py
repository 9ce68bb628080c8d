"""How a run shares out the memory beside its model: what it needs at least, and what is left for the calls it serves.

True of it: what a model in this process keeps for calls is bounded by what is free when it is loaded, so that many
episodes at once make each other wait and never run the machine out of memory.
"""

import os
from pathlib import Path

from rollwright.config import RunConfig
from rollwright.hardware.devices import device_name
from rollwright.hardware.memory import free_device_memory
from rollwright.hardware.threads import WORKERS_VARIABLE
from rollwright.models.catalogue import CATALOGUE, is_fetched, model_folder
from rollwright.models.hub import is_hub_name, local_copy
from rollwright.models.memory_needs import MemoryNeed, Use, need_of, shape_of
from rollwright.models.pools import ROOM
from rollwright.policies.settings import TorchPolicyConfig


def model_place(model: str) -> Path | None:
    """Where a model lies on this machine; `None`: it is not here."""
    if Path(model).is_dir():
        return Path(model)
    if model in CATALOGUE:
        return model_folder(model) if is_fetched(model) else None
    return local_copy(model) if is_hub_name(model) else None


def memory_need(config: RunConfig, model: str) -> MemoryNeed | None:
    """Of this model for this run; `None`: nothing tells how large it is."""
    policy, training = config.policy, config.training
    assert isinstance(policy, TorchPolicyConfig)
    shape = shape_of(model, model_place(model))
    if shape is None:
        return None
    in_flight = config.max_inflight or config.batch_size or policy.max_batch
    use = Use(
        dtype=policy.dtype,
        concurrent=min(policy.max_batch, in_flight),
        length=config.sequence_length,
        cache_bytes=policy.prefix_cache_mb * 1_000_000,
        train_tokens=0 if training is None else training.tokens_per_micro_batch,
        lora=training is not None and training.lora is not None,
        reference=training is not None and training.loss.kl_coefficient > 0,
    )
    return need_of(shape, use)


def cache_room(config: RunConfig) -> int | None:
    """Bytes that the run's policy may keep for the calls it serves; `None`: it keeps none here, or it cannot be told."""
    policy = config.policy
    if not isinstance(policy, TorchPolicyConfig):
        return None
    if policy.cache_mb is not None:
        return policy.cache_mb * 1_000_000
    need = memory_need(config, policy.model)
    free = free_device_memory(device_name(policy.device))
    if need is None or free is None:
        return None
    workers = os.environ.get(WORKERS_VARIABLE, "")
    sharing = max(1, int(workers)) if workers.isdigit() else 1
    return need.cache_room(int(ROOM * free / sharing))
