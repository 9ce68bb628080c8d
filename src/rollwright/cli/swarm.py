"""`rollwright swarm`: machines that do not trust each other train together by sharing rollouts."""

import asyncio
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from rollwright.cli.console import console, plain_lines, warn_of_password
from rollwright.cli.event_loop import run_async
from rollwright.config import RunConfig, build, load
from rollwright.observe.statistics import batch_row
from rollwright.run.engine_check import ask_engine_first
from rollwright.run.folder import CONFIG
from rollwright.run.model_choice import load_settled
from rollwright.signals import INTERRUPTS
from rollwright.swarm.heartbeat import NodeStatus
from rollwright.swarm.identity import IDENTITY_FILE, load_identity, short_name

swarm_app = typer.Typer(help="Train together with other machines by sharing rollouts.", no_args_is_help=True)

SHIPPED = "shipped/swarm.yaml"
"""In the package `rollwright.config`: what a node plays that is told nothing."""

FOLLOWS = ("seed", "rollout_batch_size")
"""Settings of a node's run that follow from its key and its swarm, so they are no choice when it goes on."""

HOMES = Path("runs")


Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings that win over the file: key.path=value …", show_default=False),
]
Home = Annotated[
    Path | None, typer.Option(help="The node's folder. Default: runs/NAME. One that exists is gone on with.")
]


@swarm_app.callback()
def swarm() -> None:
    """Train together with other machines by sharing rollouts."""


@swarm_app.command()
def join(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="YAML file with a `swarm` part. Default: what the home was made with, or puzzles with a small model.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    home: Home = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Where rollouts are kept. Default: in the home.",
            show_default=False,
            callback=warn_of_password,
        ),
    ] = None,
) -> None:
    """Join a swarm: rounds of generate, share, sample, train, evaluate. Ctrl-C ends cleanly, a crash costs nothing but
    time: the same command goes on."""
    settings, place = node_settings(config, list(overrides or []), home)
    screen = console()
    _fetch_model(settings, screen)
    run_async(ask_engine_first(settings))
    from rollwright.run.swarm_node import SwarmNode

    def make(settled: RunConfig) -> SwarmNode:
        return SwarmNode(
            settled, place, store=store, row=batch_row, on_round=lambda each: _show(each, screen)
        )

    _, node = load_settled(settings, make, home=place, say=plain_lines(screen))
    me = short_name(node.identity.peer)
    screen.print(f"{me} joins `{node.swarm.name}`; home: {place}", highlight=False, soft_wrap=True)
    try:
        run_async(node.run())
    except asyncio.CancelledError:
        screen.print(
            f"stopped after {node.training.pipeline.done:,} rounds; the same command goes on", highlight=False
        )
        raise typer.Exit(INTERRUPTS.exit_code) from None
    screen.print(f"done; the model is in {place / 'model'}", highlight=False, soft_wrap=True)


@swarm_app.command()
def identity(
    home: Annotated[Path, typer.Argument(help="The node's folder; a new identity is made if it has none.")],
) -> None:
    """Show who the node in HOME is to its peers."""
    peer = load_identity(home / IDENTITY_FILE).peer
    console().print(f"{short_name(peer)}  {peer}", highlight=False, soft_wrap=True)


def node_settings(config: Path | None, changes: list[str], home: Path | None) -> tuple[RunConfig, Path]:
    """The settings of a node, and its home."""
    if config is not None and "=" in str(config) and not config.is_file():
        changes.insert(0, str(config))  # without a file, the first setting stands in its place
        config = None
    if config is not None:
        settings = load(config, changes)
        return settings, home or HOMES / settings.name
    place = home or HOMES / Path(SHIPPED).stem
    if (place / CONFIG).is_file():
        content: dict[str, Any] = yaml.safe_load((place / CONFIG).read_text(encoding="utf-8"))
        chosen = {key: value for key, value in content.items() if key not in FOLLOWS}
        return build(chosen, changes, source=str(place / CONFIG)), place
    with as_file(files("rollwright.config") / SHIPPED) as shipped:
        return load(shipped, changes), place


def _fetch_model(settings: RunConfig, screen: Console) -> None:
    """A model of the catalogue that is not here yet."""
    from rollwright.models.catalogue import CATALOGUE, is_fetched
    from rollwright.models.fetching import fetch

    name = str(getattr(settings.policy, "model", ""))
    if name in CATALOGUE and not is_fetched(name):
        screen.print(f"fetching {CATALOGUE[name].title} ({CATALOGUE[name].megabytes} MB)", highlight=False)
        fetch(name)


def _show(status: NodeStatus, screen: Console) -> None:
    """One line for each round."""
    if not status.rounds:
        return
    last = status.rounds[-1]
    parts = [f"round {last.round}"]
    parts += [] if last.reward is None else [f"reward {last.reward:.3f}"]
    parts.append(f"{last.own_groups} own + {last.foreign_groups} foreign groups")
    peers = sum(each.alive for each in status.peers)
    parts.append(f"{peers} peer" if peers == 1 else f"{peers} peers")
    parts += [] if last.evaluation is None else [f"evaluation {last.evaluation:.3f}"]
    parts += [f"{len(status.quarantined)} in quarantine"] if status.quarantined else []
    screen.print(" · ".join(parts), highlight=False, soft_wrap=True)
