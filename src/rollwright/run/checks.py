"""Checks before a run, a worker or a node starts: first of its settings, then of the engine behind its policy.

Invariants:
- `check_config` writes nothing, loads no model and asks no engine. Settings that pass make a run, unless the machine
  changes in between or an engine refuses; a wrong setting gets the error line that making the run would have raised.
- `probe_engine` raises one line with the engine's own error and a remedy: no server, refused key, unknown model, wrong
  path, untrusted certificate, no answer in time.
"""

import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping

from rollwright.config import OpenAIPolicyConfig, PolicyConfig, RunConfig
from rollwright.engines.base import Capabilities, EngineError, Policy, Probed
from rollwright.engines.settings import EnginePolicyConfig
from rollwright.errors import ConfigError
from rollwright.rollout.filters import build_filters
from rollwright.run.build import SettingsTable, build_curriculum
from rollwright.run.build_draws import check_task_sampler
from rollwright.run.build_teams import build_run_policy, check_policies
from rollwright.run.costs import check_prices

_HINTS = (
    (("HTTP 401", "HTTP 403"), "check the key: policy.api_key_env names the variable that holds it"),
    (("is not in its list",), "correct policy.model"),
    (
        ("HTTP 404", "HTTP 405"),
        "check policy.base_url: for an OpenAI-compatible API it is what comes before /chat/completions, and often ends "
        "in /v1",
    ),
    (
        ("WRONG_VERSION_NUMBER", "record layer failure", "packet length too long"),
        "the server does not speak TLS there: write http:// instead of https://, or use its TLS port",
    ),
    (
        ("certificate", "CERTIFICATE"),
        "its certificate is not trusted here: name the host as the certificate does, or set SSL_CERT_FILE to the "
        "authority's file",
    ),
    (("broken HTTP response",), "what answers there does not speak HTTP; does the address need https://?"),
    (
        ("Name or service not known", "nodename nor servname", "Temporary failure in name"),
        "check the host's name",
    ),
    (("Cannot connect", "no answer within"), "start the engine, or correct its address in the policy"),
)
"""Parts of an error message, and the remedy; the first match is reported."""


def check_config(config: RunConfig, *, ray: str | None = None) -> None:
    """Check tags, their settings and levels, the strategy, filters, teams, policies and models; raises the first error.

    `ray`: address of the cluster that the run would use.
    """
    check_tags(config)
    check_prices(config)
    SettingsTable(config)
    build_curriculum(config)
    check_task_sampler(config)
    for manager in (config.train_env_manager, config.val_env_manager):
        if manager is not None:
            build_filters(manager)
    check_policies(config)
    if ray is not None:
        check_ray(ray)


def check_tags(config: RunConfig) -> None:
    """Raise an error if there is neither a training nor a validation manager."""
    if not config.tags:
        raise ConfigError("train_env_manager: nothing to play; give this, val_env_manager, or both")


def check_ray(address: str) -> None:
    """Raise an error if Ray is not installed, or this cannot be the address of a cluster."""
    try:
        from rollwright.run.ray_fleet import RayCluster
    except ImportError as error:
        raise ConfigError("ray: is not installed; install rollwright[ray]") from error
    RayCluster(address)


async def prepare_policy(
    config: RunConfig, *, workers: int | None = None, ray: str | None = None
) -> Policy | None:
    """Check the settings and the engine before anything is written; returns the policy if this process plays, so that a
    model in this process is loaded once."""
    check_config(config, ray=ray)
    policy = build_run_policy(config) if workers is None and ray is None else None
    await probe_engines(config, policy)
    return policy


async def probe_engine(policy: Policy, config: PolicyConfig | None = None) -> Capabilities | None:
    """Capabilities of the policy's engine; `None` for a policy without an engine. Raises an `EngineError` with the reason
    if the engine cannot be used."""
    if not isinstance(policy, Probed):
        return None
    try:
        return await policy.probe()
    except (EngineError, ConfigError) as error:
        said = str(error)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        said = f"the engine's answer is not understood ({type(error).__name__}: {error})"
    proxied = unused_proxies(engine_urls(config))
    raise EngineError("; ".join([f"engine: {said}", *_advice(said), *proxied]))


async def probe_engines(config: RunConfig, policy: Policy | None = None) -> None:
    """Probe every engine that the settings name, and close the connections, so that another event loop can play.

    A model in this process is probed when the run starts. `policy`: the configured policy, if it is built already.
    """
    teams = any(map(engine_urls, config.policies.values()))
    if not teams and not engine_urls(config.policy):
        return
    probed = policy if policy is not None and not teams else build_run_policy(config, policy)
    try:
        await probe_engine(probed, config.policy)
    finally:
        await probed.close()


def engine_urls(config: PolicyConfig | None) -> list[str]:
    """Addresses of a policy's engines; empty for a policy without."""
    match config:
        case OpenAIPolicyConfig():
            return [config.base_url]
        case EnginePolicyConfig():
            return list(config.base_urls)
        case _:
            return []


def unused_proxies(urls: Iterable[str], proxies: Mapping[str, str] | None = None) -> list[str]:
    """A note for each configured proxy that other programs would use for these engines; engine requests use none."""
    proxies = urllib.request.getproxies() if proxies is None else proxies
    notes: dict[str, None] = {}
    for url in urls:
        parts = urllib.parse.urlsplit(url)
        name = parts.scheme if parts.scheme in proxies else "all"
        if name in proxies and parts.hostname and not urllib.request.proxy_bypass(parts.hostname):
            notes[f"{name}_proxy is set, and engines are asked without a proxy"] = None
    return list(notes)


def _advice(said: str) -> list[str]:
    return next(([advice] for marks, advice in _HINTS if any(mark in said for mark in marks)), [])
