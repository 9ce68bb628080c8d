"""`rollwright gateway`: serves a model API to agents of any kind, and records their rollouts in a store."""

import asyncio
import os
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rollwright.cli.console import console, say_aside
from rollwright.cli.event_loop import run_async
from rollwright.cli.queue import StoreOption
from rollwright.errors import ConfigError
from rollwright.http.server_limits import raise_handle_limit
from rollwright.store.api import Store
from rollwright.store.opening import open_store

if TYPE_CHECKING:
    from rollwright.config import RunConfig
    from rollwright.gateway.server import Gateway
    from rollwright.gateway.service import ServiceSettings

KEY_VARIABLE = "ROLLWRIGHT_GATEWAY_KEY"
"""Environment variable that holds the administrator's key."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def gateway(
    config: Annotated[Path, typer.Argument(help="YAML file with policy, sampling and limits.")],
    store: StoreOption,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings that win over the file, as key.path=value.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8800,
    public_url: Annotated[
        str | None, typer.Option(help="Address by which agents reach it, if not host and port.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one answer.")] = 4096,
    idle_seconds: Annotated[
        float, typer.Option(min=1, help="Seconds without a call after which a rollout is abandoned.")
    ] = 900.0,
    agent_ends: Annotated[
        bool, typer.Option(help="Let a rollout's own key end it and name its reward.")
    ] = True,
    id: Annotated[str | None, typer.Option(help="Name in the store. Default: host and process.")] = None,
) -> None:
    """Serve OpenAI's and Anthropic's APIs to agents, and record what they do; each rollout has its own address and key.

    The administrator's key is taken from ROLLWRIGHT_GATEWAY_KEY; on loopback one is made up and shown if it is not set.
    """
    from rollwright.config import load

    run_config = load(config, overrides or [])
    from rollwright.gateway.server import Gateway

    settings = _settings(run_config, max_tokens, idle_seconds, agent_ends)
    key = os.environ.get(KEY_VARIABLE)
    if key is None and host not in LOOPBACK:
        raise ConfigError(
            f"host: {host!r} can be reached from other machines; set {KEY_VARIABLE}, or listen on 127.0.0.1"
        )
    name = id or f"gateway-{socket.gethostname()}-{os.getpid()}"
    server = Gateway(host=host, port=port, public_url=public_url)
    run_async(_serve(store, run_config, settings, server, key, name, console()))


def _settings(
    config: "RunConfig", max_tokens: int, idle_seconds: float, agent_ends: bool
) -> "ServiceSettings":
    from rollwright.engines.base import Sampling
    from rollwright.gateway.service import ServiceSettings

    return ServiceSettings(
        sampling=Sampling(
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            max_tokens=max_tokens,
            stop=tuple(config.sampling.stop),
        ),
        sequence_length=config.sequence_length,
        generate_seconds=config.limits.generate_timeout,
        episode_seconds=config.limits.episode_timeout,
        idle_seconds=idle_seconds,
        heartbeat_interval=config.limits.heartbeat_interval,
        lease_seconds=config.limits.lease_seconds,
        max_attempts=config.limits.max_attempts,
        rules=config.gateway,
        agent_ends=agent_ends,
        tag=config.name,
    )


async def _serve(
    address: str,
    config: "RunConfig",
    settings: "ServiceSettings",
    server: "Gateway",
    key: str | None,
    name: str,
    screen: Console,
) -> None:
    from rollwright.gateway.service import GatewayService
    from rollwright.run.build_teams import build_run_policy
    from rollwright.run.gc_tuning import short_collections

    raise_handle_limit()
    store: Store = await open_store(address, on_outage=say_aside)
    policy = build_run_policy(config)
    admin_key = key or f"rw-admin-{secrets.token_urlsafe(24)}"
    service = GatewayService(store, policy, server, settings, admin_key=admin_key, worker_id=name)
    try:
        service.listen()
        shown = "from the environment" if key else admin_key
        screen.print(f"gateway at {server.url}, administrator's key {shown}", highlight=False, soft_wrap=True)
        with short_collections(whole=True):  # conversations are trees with references in both directions
            await service.run()
    except asyncio.CancelledError:
        screen.print("requeuing open rollouts", highlight=False)
    finally:
        await service.close()
        await policy.close()
        await store.close()
