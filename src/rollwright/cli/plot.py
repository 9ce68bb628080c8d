"""`rollwright plot`: a run's figures as pictures."""

from pathlib import Path
from typing import Annotated

import typer

from rollwright.cli.condition import say_condition
from rollwright.cli.console import console
from rollwright.errors import RollwrightError
from rollwright.run.folder import RunReader

KINDS = ("png", "svg")


def plot(
    run: Annotated[Path, typer.Argument(help="Run folder.", show_default=False)],
    to: Annotated[str, typer.Option(help="Format: png or svg.")] = "png",
    output: Annotated[
        Path | None,
        typer.Option(help="Folder. Default: `plots` in the run folder.", show_default=False),
    ] = None,
) -> None:
    """Draw RUN: reward, episode lengths, tokens per leaf, what filters caught, the shapes of trees."""
    if to not in KINDS:
        raise RollwrightError(f"--to {to}: unknown format; known: {', '.join(KINDS)}")
    from rollwright.observe.plots import draw, picture_of

    reader = RunReader(run)
    files = draw(picture_of(reader), output or run / "plots", to)
    if not files:
        raise RollwrightError(f"{run}: has no batch yet, so there is nothing to draw")
    for file in files:
        console().print(f"written: {file}", soft_wrap=True, highlight=False)
    say_condition(reader, console())
