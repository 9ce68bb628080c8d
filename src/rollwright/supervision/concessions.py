"""What a node can do with less memory: settings that change how much is held at once, and nothing of what is learnt."""

from collections.abc import Sequence

from rollwright.config import RunConfig
from rollwright.policies.settings import TorchPolicyConfig

STEPS = 4
"""Halvings: the last asks for a sixteenth, below which other things fill the memory."""

LEAST_TOKENS = 128
"""In a micro-batch; a single longer row is taken whole anyway."""


def concessions(config: RunConfig, smaller_models: Sequence[str] = ()) -> list[list[str]]:
    """Settings for the first, second, … death for want of memory, as `key.path=value`.

    `smaller_models`: what may be played with instead, the largest first; only where nothing is learnt yet.
    """
    found: list[list[str]] = []
    for step in range(1, STEPS + 1):
        settings = []
        if config.training is not None:
            tokens = max(LEAST_TOKENS, config.training.tokens_per_micro_batch >> step)
            settings.append(f"training.tokens_per_micro_batch={tokens}")
        if isinstance(config.policy, TorchPolicyConfig):
            settings.append(f"policy.max_batch={max(1, config.policy.max_batch >> step)}")
            settings.append(f"policy.prefix_cache_mb={config.policy.prefix_cache_mb >> step}")
        if settings and settings not in found:
            found.append(settings)
    smallest = found[-1] if found else []
    return found + [[*smallest, f"policy.model={model}"] for model in smaller_models]
