"""`rollwright swarm`: machines that do not trust each other train together by sharing rollouts."""

from pathlib import Path
from typing import Annotated

import typer

from rollwright.cli.console import console
from rollwright.swarm.identity import IDENTITY_FILE, load_identity, short_name

swarm_app = typer.Typer(help="Train together with other machines by sharing rollouts.", no_args_is_help=True)


@swarm_app.callback()
def swarm() -> None:
    """Train together with other machines by sharing rollouts."""


@swarm_app.command()
def identity(
    home: Annotated[Path, typer.Argument(help="The node's folder; a new identity is made if it has none.")],
) -> None:
    """Show who the node in HOME is to its peers."""
    peer = load_identity(home / IDENTITY_FILE).peer
    console().print(f"{short_name(peer)}  {peer}", highlight=False, soft_wrap=True)
