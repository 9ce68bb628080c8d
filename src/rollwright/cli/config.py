"""`rollwright config`: shows effective settings and their origins, and migrates or restores configuration files."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from rollwright.cli.console import ConfigArgument, Overrides, console, plain_lines
from rollwright.config.edit import backups, lock_of, migrate, rollback
from rollwright.config.loading import load
from rollwright.config.provenance import DEFAULT, defaults, flat, origins

app = typer.Typer(
    help="Show configurations, and migrate or restore their files.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command()
def show(
    file: ConfigArgument,
    overrides: Overrides = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show the origin of each value.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show every setting as it is used: defaults, then FILE, then environment variables, then the command line."""
    values = origins(file, overrides or [])
    if as_json:
        rows = {each.key: {"value": each.value, "origin": each.origin} for each in values}
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    table = Table(title=str(file), title_justify="left")
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    if origin:
        table.add_column("from", overflow="fold")
    for each in values:
        style = "dim" if each.origin == DEFAULT else ""
        cells = [Text(each.key), Text(_format(each.value)), *([Text(each.origin)] if origin else [])]
        table.add_row(*cells, style=style)
    console().print(table)


@app.command()
def diff(
    file: ConfigArgument,
    other: Annotated[
        Path | None,
        typer.Argument(help="Another file, such as a backup. Default: the defaults.", show_default=False),
    ] = None,
) -> None:
    """Show in which settings FILE differs from the defaults, or from another file."""
    said = origins(file)
    here = {each.key: each.value for each in said}
    if other is None:
        there = defaults()
        keys = [each.key for each in said if each.origin != DEFAULT and each.value != there.get(each.key)]
    else:
        there = dict(flat(load(other).model_dump(mode="json")))
        keys = [key for key in dict.fromkeys([*here, *there]) if here.get(key) != there.get(key)]
    if not keys:
        console().print("no difference", highlight=False)
        return
    table = Table()
    table.add_column("setting", no_wrap=True)
    table.add_column(DEFAULT if other is None else other.name, overflow="fold")
    table.add_column(file.name, overflow="fold")
    for key in keys:
        table.add_row(key, *(Text(_format(each[key]) if key in each else "–") for each in (there, here)))
    console().print(table)


@app.command("migrate")
def migrate_file(
    file: ConfigArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the file as it would be.")] = False,
) -> None:
    """Rewrite FILE for this release's settings. Its bytes are kept in a backup beside it."""
    done = migrate(file, dry_run=dry_run)
    say = plain_lines(console())
    if dry_run:
        typer.echo(done.text, nl=False)
        return
    if done.backup is None:
        say(f"{file}: is of version {done.after} already")
        return
    for change in done.changes:
        say(f"changed: {change}")
    if done.comments_lost:
        say("its comments are lost; they are in the backup")
    say(f"{file}: from version {done.before} to {done.after}; backup: {done.backup}")


@app.command("rollback")
def roll_back(
    file: ConfigArgument,
    to: Annotated[
        Path | None, typer.Option(help="The backup to restore. Default: the newest.", show_default=False)
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the backups and change nothing.")] = False,
) -> None:
    """Restore the exact bytes of a backup. The present file is backed up first, so this can be undone, too."""
    say = plain_lines(console())
    if listed:
        for each in backups(file):
            say(str(each))
        return
    done = rollback(file, to)
    say(f"{file}: restored from {done.restored}; backup of the previous file: {done.backup}")
    if done.dependencies:
        say(
            f"{len(done.dependencies)} packages were installed in other versions then; to go back to them, too: "
            f"pip install -r {lock_of(done.restored)}"
        )


def _format(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
