"""Builds a policy from its settings. Heavy libraries are imported only for the kinds that need them."""

from importlib.util import find_spec
from pathlib import Path
from typing import cast

from rollwright.engines.base import Policy, Renderer
from rollwright.engines.settings import (
    DIALECTS,
    POLICIES,
    DialectPolicyConfig,
    LlamaCppPolicyConfig,
    OpenAIPolicyConfig,
    OwnPolicyConfig,
    PolicyConfig,
    RendererConfig,
    SglangPolicyConfig,
    TorchPolicyConfig,
    VllmPolicyConfig,
)
from rollwright.errors import ConfigError
from rollwright.hardware import claim_threads
from rollwright.models.loading import find

_MEMBERS = ("generate", "close", "version", "pressure", "renderer")
"""The members of `Policy`."""


def build_policy(settings: PolicyConfig, cache_bytes: int | None = None) -> Policy:
    """Build a policy. `cache_bytes`: memory of a model in this process for running calls; `None`: no limit."""
    match settings:
        case OwnPolicyConfig():
            return _own(settings)
        case TorchPolicyConfig():
            return make_torch(settings, cache_bytes)
        case _:
            return cast(Policy, POLICIES.find(settings.kind)(settings))


def check_policy(settings: PolicyConfig) -> None:
    """Raise a `ConfigError` for wrong settings, as far as they can be checked without building the policy."""
    if isinstance(settings, TorchPolicyConfig):
        for package in ("torch", "transformers"):
            if find_spec(package) is None:
                raise ConfigError(f"policy.kind torch needs {package}; install rollwright[train]")
        find(settings.model)


def kind_takes_tools(settings: PolicyConfig) -> bool:
    """Whether a policy with these settings supports tools; see `engines.base.takes_tools`."""
    return not isinstance(settings, OpenAIPolicyConfig) or settings.api == "chat"


def _own(settings: OwnPolicyConfig) -> Policy:
    made = POLICIES.make(settings.policy, **settings.options)
    with POLICIES.blame(settings.policy):
        missing = [name for name in _MEMBERS if not hasattr(made, name)]
    if missing:
        raise ConfigError(f"policy {settings.policy}: a {type(made).__name__} has no {', '.join(missing)}")
    return cast(Policy, made)


def make_openai(settings: OpenAIPolicyConfig) -> Policy:
    from rollwright.engines.openai import OpenAIPolicy

    return OpenAIPolicy(settings)


def make_vllm(settings: VllmPolicyConfig) -> Policy:
    from rollwright.engines.vllm import VllmPolicy

    return VllmPolicy(settings, settings.model, _renderer(settings.renderer), extra_body=settings.extra_body)


def make_engine(settings: SglangPolicyConfig | LlamaCppPolicyConfig | DialectPolicyConfig) -> Policy:
    """Build the policy of an engine whose dialect has no settings of its own in the configuration."""
    from rollwright.engines.http_policy import HttpEnginePolicy

    if isinstance(settings, DialectPolicyConfig):
        dialect = DIALECTS.make(settings.dialect, **settings.options)
    else:
        dialect = DIALECTS.make(settings.kind)
    return HttpEnginePolicy(settings, dialect, _renderer(settings.renderer))


def _renderer(settings: RendererConfig) -> Renderer:
    from rollwright.engines.rendering import load_tokenizer, make_renderer
    from rollwright.models.loading import resolve

    return make_renderer(load_tokenizer(Path(resolve(settings.tokenizer))), settings.name, **settings.options)


def make_torch(settings: TorchPolicyConfig, cache_bytes: int | None = None) -> Policy:
    claim_threads(settings.threads)
    try:
        from rollwright.engines.torch import load_policy
    except ImportError as error:
        raise ConfigError(f"policy.kind torch needs {error.name}; install rollwright[train]") from error
    return load_policy(settings, cache_bytes=cache_bytes)
