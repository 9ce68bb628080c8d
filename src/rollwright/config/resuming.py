"""Rules for settings that may change when a run is resumed. Pure.

Invariant: settings that decide which episodes there are, and how they are played, do not change. A resumed run continues
existing episodes, groups and batches, and would otherwise mix two runs. A key without a rule may not change.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from math import lcm
from types import MappingProxyType
from typing import Any

from rollwright.config.run import RunConfig
from rollwright.errors import ConfigError
from rollwright.rollout.settings import EnvManagerConfig

_POLICY = {
    "": False,
    "slots": True,
    "tokens_per_second": True,
    "failure_rate": True,
    "hang_rate": True,
    "max_queue": True,
    "base_url": True,
    "base_urls": True,
    "api_key_env": True,
    "request_timeout": True,
    "max_retries": True,
    "max_connections": True,
    "token_limit": True,
    "compress": True,
    "requests_per_minute": True,
    "tokens_per_minute": True,
    "rate_limit_patience": True,
    "outage_patience": True,
    "routing": True,
    "device": True,
    "threads": True,
    "max_batch": True,
    "prefix_cache_mb": True,
    "cache_mb": True,
}
"""Address and load of the engine may change; the model and its sampling may not."""

_TRAINING = {
    "": False,
    "learning_rate": True,
    "warmup_updates": True,
    "final_learning_rate": True,
    "weight_decay": True,
    "max_grad_norm": True,
    "tokens_per_micro_batch": True,
    "device": True,
    "max_logprob_gap": True,
    "max_skips_in_a_row": True,
    "processes": True,
    "sharding": True,
    "shard_ranks": True,
    "gather": True,
    "activation_checkpointing": True,
    "rank_timeout": True,
    "rank_restarts": True,
    "update_mode": True,
    "hand_over": True,
    "checkpoint_steps": True,
    "keep_checkpoints": True,
    "keep_steps": True,
    "writers": True,
    "serve.host": True,
    "serve.port": True,
    "serve.token_env": True,
    "serve.lease_seconds": True,
}
"""Step sizes, memory and safety limits may change, from the last checkpoint on; the training objective may not."""


def _below(section: str, rules: Mapping[str, bool]) -> dict[str, bool]:
    return {f"{section}.{key}" if key else section: may for key, may in rules.items()}


MAY_CHANGE: Mapping[str, bool] = MappingProxyType(
    {
        "name": False,
        "seed": False,
        "max_steps": True,
        "rollout_batch_size": True,
        "async_generation_ratio": True,
        "folder": True,
        "eval_steps": True,
        "profile_steps": True,
        "sequence_length": False,
        "max_inflight": True,
        "keep_steps": True,
        **_below("policy", _POLICY),
        "default_large_model_pool": True,
        "default_small_model_pool": True,
        "downloads": True,
        **_below("policies.*", _POLICY),
        "sampling": False,
        "agent": False,
        "strategy": False,
        "orchestras": False,
        "limits": True,
        "gateway": False,
        "remote": True,
        **_below("training", _TRAINING),
        "swarm": True,
        "train_env_manager": False,
        "train_env_manager.max_env_num_per_worker": True,
        "val_env_manager": False,
        "val_env_manager.max_env_num_per_worker": True,
        "evaluation": False,
        "evaluation.k": True,
        "evaluation.confidence": True,
        "evaluation.by": True,
        "evaluation.cache": True,
        "prices": True,
        "budget": True,
        "custom_envs": False,
        "custom_envs.*.step_timeout": True,
        "custom_envs.*.tasks": True,
    }
)
"""Rules by key or section; the longest match applies. `*` matches any name."""

_GROUPS = ("train_env_manager.num_env_groups", "train_env_manager.num_groups_partition")
"""The number of concurrent groups may change if the order of the tags stays the same."""


@dataclass(frozen=True)
class SettingChange:
    """A key whose value differs from before."""

    key: str
    before: Any
    now: Any
    may_change: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} → {self.now!r}"


def may_change(key: str) -> bool | None:
    """Rule for a key; `None` without one."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        for name in _patterns(parts[:length]):
            if name in MAY_CHANGE:
                return MAY_CHANGE[name]
    return None


def _patterns(parts: list[str]) -> Iterator[str]:
    yield ".".join(parts)
    if len(parts) > 1:  # only the second part of a key can be a name that the user chose
        yield ".".join([parts[0], "*", *parts[2:]])


def setting_changes(before: RunConfig, now: RunConfig) -> list[SettingChange]:
    """All changed keys, in the order of the settings."""
    old, new = _flat(before.model_dump(mode="json")), _flat(now.model_dump(mode="json"))
    same_order = _same_order(before.train_env_manager, now.train_env_manager)
    return [
        SettingChange(
            key, old.get(key), new.get(key), bool(may_change(key)) or (key in _GROUPS and same_order)
        )
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]


def check_resumable(before: RunConfig, now: RunConfig) -> list[SettingChange]:
    """Changes between two configurations; raises a `ConfigError` that names forbidden ones."""
    changes = setting_changes(before, now)
    refused = [str(each) for each in changes if not each.may_change]
    if refused:
        raise ConfigError(
            f"a run is resumed with the settings that it was started with; these would change its episodes: "
            f"{'; '.join(refused)}. Set them back, or start another run"
        )
    return changes


def _same_order(before: EnvManagerConfig | None, now: EnvManagerConfig | None) -> bool:
    """Whether every group of the stream keeps its tag."""
    if before is None or now is None:
        return False
    old, new = before.slot_tags(), now.slot_tags()
    length = lcm(len(old), len(new))
    return list(islice(cycle(old), length)) == list(islice(cycle(new), length))


def _flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Values by dotted path; an unset section is a value, too."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            found.update(_flat(value, f"{above}{key}."))
        else:
            found[above + key] = value
    return found
