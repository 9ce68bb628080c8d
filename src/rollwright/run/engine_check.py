"""The engine behind a policy is asked before a run, a worker or a node opens anything.

What it said is the error, in one line with what to do about it: nobody is there, the key is refused, the model is
unknown, the path is wrong, the certificate is not trusted, it does not answer in time.
"""

import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping

from rollwright.config import OpenAIPolicyConfig, PolicyConfig, RunConfig
from rollwright.engines.base import Capabilities, EngineError, Policy, Probed
from rollwright.engines.settings import EnginePolicyConfig
from rollwright.errors import ConfigError
from rollwright.run.build_teams import build_run_policy

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
"""What an error holds, and what to do about it; the first that fits is told."""


async def ask_engine(policy: Policy, config: PolicyConfig | None = None) -> Capabilities | None:
    """What the engine can do; `None` for a policy without one to ask. Raises an `EngineError` that says why it cannot be
    used."""
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


async def ask_engine_first(config: RunConfig, policy: Policy | None = None) -> None:
    """The same for every engine of a run's settings, in an event loop before the run's own; nothing is left open. `policy`:
    one that was made of the settings already. What computes in this process is asked when it starts."""
    teams = any(map(engine_urls, config.policies.values()))
    if not teams and not engine_urls(config.policy):
        return
    asked = policy if policy is not None and not teams else build_run_policy(config, policy)
    try:
        await ask_engine(asked, config.policy)
    finally:
        await asked.close()


def engine_urls(config: PolicyConfig | None) -> list[str]:
    """Where the engines of a policy are; empty for one that needs none."""
    match config:
        case OpenAIPolicyConfig():
            return [config.base_url]
        case EnginePolicyConfig():
            return list(config.base_urls)
        case _:
            return []


def unused_proxies(urls: Iterable[str], proxies: Mapping[str, str] | None = None) -> list[str]:
    """A note for each of the user's proxies that other programs would reach these engines by; requests here go straight."""
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
