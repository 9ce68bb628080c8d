"""The models that a run's settings mean: of a pool one that fits, and on this machine before anything starts.

True of it: a pool is resolved once. The name that was chosen stands in the run's own configuration, so that a resumed
run, its workers and its trainer all have the same model; and a node's home keeps the choice beside it, for a file that
still says `auto`. Where loading runs out of memory, the next smaller model is taken, and this is said.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from rollwright.config import RunConfig
from rollwright.config.model_pools import AUTO_MODEL, LARGE_POOL, SMALL_POOL
from rollwright.config.torch_policy import TorchPolicyConfig
from rollwright.errors import ConfigError
from rollwright.hardware.devices import device_name
from rollwright.hardware.memory import free_device_memory, is_out_of_memory
from rollwright.models.cache import is_fetched, model_folder
from rollwright.models.catalogue import CATALOGUE
from rollwright.models.fetching import fetch
from rollwright.models.hub import DownloadRules, download, is_hub_name, local_copy
from rollwright.models.needs import Use, need_of, shape_of
from rollwright.models.pools import ModelChoice, choose_model

CHOICE = "model_choice.json"
"""In a node's home."""

POOLED = (AUTO_MODEL, LARGE_POOL, SMALL_POOL)

Say = Callable[[str], None]
Loaded = TypeVar("Loaded")

_log = logging.getLogger(__name__)


def settle_model(config: RunConfig, *, home: Path | None = None, say: Say = _log.info) -> RunConfig:
    """The configuration with the model's own name in it, and the model on this machine."""
    return _settle(config, home, say)[0]


def load_settled(
    config: RunConfig, load: Callable[[RunConfig], Loaded], *, home: Path | None = None, say: Say = _log.info
) -> tuple[RunConfig, Loaded]:
    """What `load` makes of the settled configuration; of a pool, a smaller model where that runs out of memory."""
    settled, choice = _settle(config, home, say)
    while True:
        try:
            return settled, load(settled)
        except Exception as error:
            if choice is None or not is_out_of_memory(error):
                raise
            say(f"{choice.model}: ran out of memory; a smaller model is looked for")
            choice = pick_model(config, below=choice.need)
        settled = _with(config, choice.model)
        _explain(choice, say)
        _keep(config, choice, home)
        _fetch(settled, say, from_pool=True)


def pick_model(config: RunConfig, *, below: int | None = None) -> ModelChoice:
    """Of the pools that the settings name; `below`: only those that need less than so many bytes."""
    policy = _pooled(config)
    if policy is None:
        raise ConfigError(f"policy.model: names no pool; accepted: {', '.join(POOLED)}")
    pools = {
        LARGE_POOL: config.default_large_model_pool,
        SMALL_POOL: config.default_small_model_pool,
    }
    named = pools if policy.model == AUTO_MODEL else {policy.model: pools[policy.model]}
    free = free_device_memory(device_name(policy.device))
    return choose_model(named, lambda model: _need(config, model), free, config.seed, below=below)


def smaller_models(config: RunConfig) -> list[str]:
    """What the pools have, from the largest need to the smallest; empty where no pool is named."""
    if _pooled(config) is None:
        return []
    names = [*config.default_large_model_pool, *config.default_small_model_pool]
    needs = {name: need for name in dict.fromkeys(names) if (need := _need(config, name)) is not None}
    return sorted(needs, key=lambda name: -needs[name])


def _settle(config: RunConfig, home: Path | None, say: Say) -> tuple[RunConfig, ModelChoice | None]:
    choice = None
    if _pooled(config) is not None:
        choice = _kept(config, home)
        if choice is None:
            choice = pick_model(config)
            _explain(choice, say)
            _keep(config, choice, home)
        config = _with(config, choice.model)
    _fetch(config, say, from_pool=choice is not None)
    return config, choice


def _pooled(config: RunConfig) -> TorchPolicyConfig | None:
    policy = config.policy
    return policy if isinstance(policy, TorchPolicyConfig) and policy.model in POOLED else None


def _with(config: RunConfig, model: str) -> RunConfig:
    return config.model_copy(update={"policy": config.policy.model_copy(update={"model": model})})


def _explain(choice: ModelChoice, say: Say) -> None:
    for reason in choice.reasons:
        say(f"model: {reason}")


def _need(config: RunConfig, model: str) -> int | None:
    policy, training = config.policy, config.training
    assert isinstance(policy, TorchPolicyConfig)
    folder: Path | None = Path(model) if Path(model).is_dir() else None
    if model in CATALOGUE:
        folder = model_folder(model) if is_fetched(model) else None
    elif folder is None and is_hub_name(model):
        folder = local_copy(model)
    shape = shape_of("135M" if model in CATALOGUE and folder is None else model, folder)
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
    return need_of(shape, use).total


def _fetch(config: RunConfig, say: Say, *, from_pool: bool) -> None:
    """Of a hub, with this run's patience; afterwards everybody finds it on this machine."""
    policy = config.policy
    if not isinstance(policy, TorchPolicyConfig) or Path(policy.model).is_dir():
        return
    if from_pool and policy.model in CATALOGUE and not is_fetched(policy.model):
        say(f"model: {CATALOGUE[policy.model].title} is fetched")
        fetch(policy.model)
    if not is_hub_name(policy.model):
        return
    if local_copy(policy.model) is None:
        say(f"model: {policy.model} is no folder here, and is downloaded")
        wait = config.downloads
        rules = DownloadRules(wait.timeout, wait.total_timeout, wait.retries, wait.offline)
        download(policy.model, rules)


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
    """What was chosen for the same wish in this home."""
    try:
        content = json.loads(((home or Path()) / CHOICE).read_text(encoding="utf-8")) if home else {}
        policy = _pooled(config)
        if policy is None or content.pop("wanted", None) != policy.model:
            return None
        return ModelChoice(**{**content, "reasons": tuple(content["reasons"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
