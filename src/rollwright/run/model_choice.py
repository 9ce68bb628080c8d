"""Chooses, fetches and sizes the models of a run before anything starts.

Invariants:
- A model pool is resolved once. The chosen name is written into the run's own configuration, so that a resumed run, its
  workers and its trainer use the same model. A swarm node's home keeps the choice for a configuration that still says `auto`.
- If loading a model of a pool runs out of memory, the next smaller one is tried, with a message.
- The cache of a model in this process is bounded by the memory that is free when it is loaded, so that many concurrent
  episodes wait for each other instead of exhausting the machine's memory.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from rollwright.config import RunConfig
from rollwright.engines.settings import TorchPolicyConfig
from rollwright.errors import ConfigError, RollwrightError
from rollwright.hardware import (
    WORKERS_VARIABLE,
    choose_batch,
    choose_dtype,
    device_name,
    free_device_memory,
    is_out_of_memory,
)
from rollwright.models.catalogue import CATALOGUE, is_fetched, model_folder
from rollwright.models.fetching import fetch
from rollwright.models.hub import DownloadError, DownloadRules, download, is_hub_name, local_copy
from rollwright.models.loading import unknown_model
from rollwright.models.pools import ROOM, MemoryNeed, ModelChoice, Use, choose_model, need_of, shape_of
from rollwright.models.settings import AUTO_MODEL, LARGE_POOL, SMALL_POOL


def model_place(model: str) -> Path | None:
    """Folder of a model on this machine; `None` if it is not here."""
    if Path(model).is_dir():
        return Path(model)
    if model in CATALOGUE:
        return model_folder(model) if is_fetched(model) else None
    return local_copy(model) if is_hub_name(model) else None


def memory_need(config: RunConfig, model: str) -> MemoryNeed | None:
    """Memory that this run needs with this model; `None` if the model's size is unknown."""
    policy, training = config.policy, config.training
    assert isinstance(policy, TorchPolicyConfig)
    shape = shape_of(model, model_place(model))
    if shape is None:
        return None
    batch = choose_batch(policy.max_batch)
    in_flight = config.max_inflight or config.batch_size or batch
    use = Use(
        dtype=choose_dtype(policy.dtype),
        concurrent=min(batch, in_flight),
        length=config.sequence_length,
        cache_bytes=policy.prefix_cache_mb * 1_000_000,
        train_tokens=0 if training is None else training.tokens_per_micro_batch,
        lora=training is not None and training.lora is not None,
        reference=training is not None and training.loss.kl_coefficient > 0,
    )
    return need_of(shape, use)


def cache_room(config: RunConfig) -> int | None:
    """Bytes that the run's policy may use for its cache; `None` if there is no cache here, or its room is unknown."""
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


CHOICE = "model_choice.json"
"""File in a node's home."""

POOLED = (AUTO_MODEL, LARGE_POOL, SMALL_POOL)

POOL_RETRIES = 1
"""Retries for a model of a pool; another model is taken if the hub does not answer."""

LEAST_BYTES = 1000
"""Smallest total that is taken for bytes; smaller totals count stages."""

Say = Callable[[str], None]
Loaded = TypeVar("Loaded")

_log = logging.getLogger(__name__)


def settle_model(config: RunConfig, *, home: Path | None = None, say: Say = _log.info) -> RunConfig:
    """Fetch the run's model; returns the configuration with the model's name in place of a pool's."""
    return _settle(config, home, say)[0]


def load_settled(
    config: RunConfig, load: Callable[[RunConfig], Loaded], *, home: Path | None = None, say: Say = _log.info
) -> tuple[RunConfig, Loaded]:
    """Settle the model and call `load`; of a pool, smaller models are tried while `load` runs out of memory."""
    settled, choice = _settle(config, home, say)
    while True:
        try:
            return settled, load(settled)
        except Exception as error:
            if choice is None or not is_out_of_memory(error):
                raise
            say(f"{choice.model}: ran out of memory; trying a smaller model")
        settled, choice = _pick_and_fetch(config, home, say, below=choice.need)


def pick_model(
    config: RunConfig, *, below: int | None = None, out_of_reach: Collection[str] | None = None
) -> ModelChoice:
    """Choose a model of the pools that the settings name.

    `below`: only models that need fewer bytes. `out_of_reach`: models that cannot be fetched; by default, if downloads are
    off, all models that are not on this machine.
    """
    policy = _pooled(config)
    if policy is None:
        raise ConfigError(f"policy.model: names no pool; accepted: {', '.join(POOLED)}")
    pools = {
        LARGE_POOL: config.default_large_model_pool,
        SMALL_POOL: config.default_small_model_pool,
    }
    named = pools if policy.model == AUTO_MODEL else {policy.model: pools[policy.model]}
    if out_of_reach is None:
        offline = download_rules(config).in_environment().offline
        out_of_reach = (
            [each for pool in named.values() for each in pool if not is_here(each)] if offline else []
        )
    free = free_device_memory(device_name(policy.device))
    return choose_model(
        named,
        lambda model: memory_need(config, model),
        free,
        config.seed,
        below=below,
        out_of_reach=out_of_reach,
    )


def smaller_models(config: RunConfig) -> list[str]:
    """Models of the pools by falling memory need; empty if no pool is named."""
    if _pooled(config) is None:
        return []
    names = [*config.default_large_model_pool, *config.default_small_model_pool]
    needs = {name: need for name in dict.fromkeys(names) if (need := memory_need(config, name)) is not None}
    return sorted(needs, key=lambda name: -needs[name].total)


def is_here(model: str) -> bool:
    """Whether the model is on this machine."""
    return model_place(model) is not None


def _settle(config: RunConfig, home: Path | None, say: Say) -> tuple[RunConfig, ModelChoice | None]:
    if _pooled(config) is None:
        _fetch(config, say, download_rules(config))
        return config, None
    choice = _kept(config, home)
    if choice is None:
        return _pick_and_fetch(config, home, say)
    settled = _with(config, choice.model)
    _fetch(settled, say, download_rules(config), from_pool=True)
    return settled, choice


def _pick_and_fetch(
    config: RunConfig, home: Path | None, say: Say, *, below: int | None = None
) -> tuple[RunConfig, ModelChoice]:
    """Choose and fetch; if the hub does not answer, only models of this machine and of other sources are considered."""
    out_of_reach: list[str] | None = None
    rules = download_rules(config)
    while True:
        choice = pick_model(config, below=below, out_of_reach=out_of_reach)
        _explain(choice, say)
        settled = _with(config, choice.model)
        try:
            few = rules.model_copy(update={"retries": min(rules.retries, POOL_RETRIES)})
            _fetch(settled, say, few, from_pool=True)
        except RollwrightError as error:
            say(f"model: {choice.model} cannot be fetched: {error}")
            gone = [choice.model]
            if isinstance(error, DownloadError):  # the hub fails for all of its models that are not here
                names = [*config.default_large_model_pool, *config.default_small_model_pool]
                gone += [each for each in names if is_hub_name(each) and not is_here(each)]
            out_of_reach = [*(out_of_reach or ()), *gone]
            continue
        _keep(config, choice, home)
        return settled, choice


def _pooled(config: RunConfig) -> TorchPolicyConfig | None:
    policy = config.policy
    return policy if isinstance(policy, TorchPolicyConfig) and policy.model in POOLED else None


def _with(config: RunConfig, model: str) -> RunConfig:
    return config.model_copy(update={"policy": config.policy.model_copy(update={"model": model})})


def _explain(choice: ModelChoice, say: Say) -> None:
    for reason in choice.reasons:
        say(f"model: {reason}")


def download_rules(config: RunConfig) -> DownloadRules:
    return DownloadRules(**dict(config.downloads))


def _fetch(config: RunConfig, say: Say, rules: DownloadRules, *, from_pool: bool = False) -> None:
    """Download the run's model unless it is on this machine."""
    policy = config.policy
    if not isinstance(policy, TorchPolicyConfig) or is_here(policy.model):
        return
    progress = ProgressLines(say)
    if policy.model in CATALOGUE:
        if from_pool:
            source = CATALOGUE[policy.model]
            say(f"model: {source.title} is fetched, {source.megabytes} MB")
            fetch(policy.model, progress)
        return  # loading raises an error that says how to fetch it
    if not is_hub_name(policy.model):
        raise unknown_model(policy.model)
    say(f"model: {policy.model} is no folder here, and is downloaded")
    download(policy.model, rules, progress, on_trouble=lambda trouble: say(f"model: {trouble}"))


class ProgressLines:
    """Reports the progress of a download every few seconds."""

    def __init__(self, say: Say, every: float = 5.0) -> None:
        self._say = say
        self._every = every
        self._next = 0.0

    def __call__(self, what: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._every
        if total is None or total > LEAST_BYTES:  # a smaller total counts stages
            of = f" of {total / 1e6:,.0f} MB ({done / total:.0%})" if total else " MB"
            self._say(f"model: {what}: {done / 1e6:,.0f}{of}")
        else:
            self._say(f"model: {what}")


def _keep(config: RunConfig, choice: ModelChoice, home: Path | None) -> None:
    if home is None:
        return
    home.mkdir(parents=True, exist_ok=True)
    partial = home / f"{CHOICE}.partial"
    policy = _pooled(config)
    content = {"wanted": None if policy is None else policy.model, **asdict(choice)}
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(home / CHOICE)


def _kept(config: RunConfig, home: Path | None) -> ModelChoice | None:
    """The choice that this home keeps for the same setting; `None` without one."""
    try:
        content = json.loads(((home or Path()) / CHOICE).read_text(encoding="utf-8")) if home else {}
        policy = _pooled(config)
        if policy is None or content.pop("wanted", None) != policy.model:
            return None
        return ModelChoice(**{**content, "reasons": tuple(content["reasons"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
