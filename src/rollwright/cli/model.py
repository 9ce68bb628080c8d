"""`rollwright model`: fetches and lists models for this machine."""

from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from rollwright.cli.console import console
from rollwright.models.catalogue import CATALOGUE, is_fetched, model_folder
from rollwright.models.fetching import fetch as fetch_model
from rollwright.models.fetching import source

app = typer.Typer(
    help="Fetch models for this machine, and list them.", no_args_is_help=True, add_completion=False
)


def complete_name(incomplete: str) -> list[str]:
    """Complete a name of the catalogue."""
    return [name for name in CATALOGUE if name.startswith(incomplete)]


@app.command()
def fetch(
    name: Annotated[
        str, typer.Argument(help="As `rollwright model list` shows it.", autocompletion=complete_name)
    ],
) -> None:
    """Download NAME and put it into the local cache, ready to be played and trained."""
    wanted = source(name)
    if is_fetched(name):
        console().print(f"{name} is here: {model_folder(name)}", highlight=False, soft_wrap=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console()) as bars:
        running: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int | None) -> None:
            stage = what.split(":")[0]
            if stage not in running:
                running[stage] = bars.add_task(what, total=total)
            bars.update(running[stage], description=what, completed=done, total=total)

        folder = fetch_model(name, show)
    console().print(f"{wanted.title} ({wanted.license}) is in {folder}", highlight=False, soft_wrap=True)


@app.command("list")
def list_models() -> None:
    """List the models that can be fetched by name."""
    table = Table(title="models", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("what it is")
    table.add_column("license")
    table.add_column("download", justify="right")
    table.add_column("on this machine")
    for name, each in CATALOGUE.items():
        here = str(model_folder(name)) if is_fetched(name) else "no"
        table.add_row(name, each.title, each.license, f"{each.megabytes} MB", here)
    console().print(table)
