"""Smaller settings for a node that ran out of memory: they change the memory in use, never what is learnt."""

from collections.abc import Sequence

from rollwright.config import RunConfig
from rollwright.engines.settings import TorchPolicyConfig

STEPS = 4
"""Halvings: the last leaves a sixteenth, below which other things fill the memory."""

LEAST_TOKENS = 128
"""Least tokens of a micro-batch; a single longer row is computed whole anyway."""


def oom_fallbacks(config: RunConfig, smaller_models: Sequence[str] = ()) -> list[list[str]]:
    """The settings after the first, second, … out-of-memory exit, as `key.path=value`.

    `smaller_models`: alternatives, the largest first; only for a node that has learnt nothing yet.
    """
    found: list[list[str]] = []
    for step in range(1, STEPS + 1):
        settings = []
        if config.training is not None:
            tokens = max(LEAST_TOKENS, config.training.tokens_per_micro_batch >> step)
            settings.append(f"training.tokens_per_micro_batch={tokens}")
        if isinstance(config.policy, TorchPolicyConfig):
            if isinstance(config.policy.max_batch, int):
                settings.append(f"policy.max_batch={max(1, config.policy.max_batch >> step)}")
            settings.append(f"policy.prefix_cache_mb={config.policy.prefix_cache_mb >> step}")
        if settings and settings not in found:
            found.append(settings)
    smallest = found[-1] if found else []
    return found + [[*smallest, f"policy.model={model}"] for model in smaller_models]
