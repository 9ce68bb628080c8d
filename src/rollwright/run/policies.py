"""From a policy's configuration to the policy. Heavy libraries are imported for the kinds that need them alone."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollwright.config import (
    OpenAIPolicyConfig,
    OraclePolicyConfig,
    PolicyConfig,
    RandomPolicyConfig,
    SimulatedPolicyConfig,
)
from rollwright.config.engines import (
    EnginePolicyConfig,
    LlamaCppPolicyConfig,
    SglangPolicyConfig,
    VllmPolicyConfig,
)
from rollwright.config.rendering import RendererConfig
from rollwright.config.torch_policy import TorchPolicyConfig
from rollwright.errors import ConfigError
from rollwright.hardware.threads import claim_threads
from rollwright.models.loading import find
from rollwright.policies.base import Policy, Renderer
from rollwright.policies.lengths import LogNormalLength
from rollwright.policies.players import OraclePlayer, RandomPlayer, SkilledPlayer
from rollwright.policies.retry import RetryPolicy
from rollwright.policies.simulated import SimulatedEngine


def build_policy(config: PolicyConfig, cache_bytes: int | None = None) -> Policy:
    """`cache_bytes`: what a model in this process may keep for the calls it serves; `None`: as much as they need."""
    match config:
        case RandomPolicyConfig():
            return RandomPlayer()
        case OraclePolicyConfig():
            return OraclePlayer()
        case SimulatedPolicyConfig():
            return build_simulated(config, SkilledPlayer(config.skill))
        case OpenAIPolicyConfig():
            return _openai(config)
        case VllmPolicyConfig() | SglangPolicyConfig() | LlamaCppPolicyConfig():
            return _engine(config)
        case TorchPolicyConfig():
            return _in_process(config, cache_bytes)


def check_policy(config: PolicyConfig) -> None:
    """Raises what is wrong with a policy's settings, as far as it can be known without making one."""
    if isinstance(config, TorchPolicyConfig):
        for package in ("torch", "transformers"):
            if find_spec(package) is None:
                raise ConfigError(f"policy.kind torch needs {package}; install rollwright[train]")
        find(config.model)


def kind_takes_tools(config: PolicyConfig) -> bool:
    """Whether the model of a policy with these settings can be told of tools; see `policies.base.takes_tools`."""
    return not isinstance(config, OpenAIPolicyConfig) or config.api == "chat"


def build_simulated(config: SimulatedPolicyConfig, player: SkilledPlayer) -> SimulatedEngine:
    return SimulatedEngine(
        slots=config.slots,
        tokens_per_second=config.tokens_per_second,
        lengths=LogNormalLength(config.mean_tokens, config.spread),
        player=player,
        failure_rate=config.failure_rate,
        hang_rate=config.hang_rate,
        max_queue=config.max_queue,
        track_episodes=False,
    )


def _openai(config: OpenAIPolicyConfig) -> Policy:
    from rollwright.policies.openai import OpenAIPolicy

    return OpenAIPolicy(
        base_url=config.base_url,
        model=config.model,
        api=config.api,
        api_key_env=config.api_key_env,
        request_timeout=config.request_timeout,
        retry=RetryPolicy(max_retries=config.max_retries),
        max_connections=config.max_connections,
        extra_body=config.extra_body,
    )


def _engine(config: VllmPolicyConfig | SglangPolicyConfig | LlamaCppPolicyConfig) -> Policy:
    from rollwright.policies.engines import LlamaCppPolicy, SglangPolicy, VllmPolicy

    renderer, settings = _renderer(config.renderer), _engine_settings(config)
    match config:
        case VllmPolicyConfig():
            return VllmPolicy(
                config.base_urls, config.model, renderer, extra_body=config.extra_body, **settings
            )
        case SglangPolicyConfig():
            return SglangPolicy(config.base_urls, renderer, **settings)
        case LlamaCppPolicyConfig():
            return LlamaCppPolicy(config.base_urls, renderer, **settings)


def _engine_settings(config: EnginePolicyConfig) -> dict[str, Any]:
    return {
        "api_key_env": config.api_key_env,
        "request_timeout": config.request_timeout,
        "retry": RetryPolicy(max_retries=config.max_retries),
        "max_connections": config.max_connections,
        "outage_patience": config.outage_patience,
        "vocabulary_size": config.vocabulary_size,
        "seeded": config.seeded,
    }


def _renderer(config: RendererConfig) -> Renderer:
    from rollwright.models.loading import resolve
    from rollwright.policies.rendering import load_tokenizer, make_renderer

    return make_renderer(load_tokenizer(Path(resolve(config.tokenizer))), config.name, **config.options)


def _in_process(config: TorchPolicyConfig, cache_bytes: int | None) -> Policy:
    claim_threads(config.threads)
    try:
        from rollwright.policies.torch import load_policy
    except ImportError as error:
        raise ConfigError(f"policy.kind torch needs {error.name}; install rollwright[train]") from error
    return load_policy(
        config.model,
        config.renderer,
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        max_batch=config.max_batch,
        batch_invariant=config.batch_invariant,
        prefix_cache_mb=config.prefix_cache_mb,
        cache_bytes=cache_bytes,
    )
