"""`rollwright doctor`: diagnoses a machine, a configuration and a node, with remedies."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from rollwright.cli.console import RUNS, Overrides, complete_config, console
from rollwright.cli.swarm import node_settings
from rollwright.config import RunConfig
from rollwright.doctor.checks import (
    Finding,
    Health,
    check_boxes,
    check_clock,
    check_engine,
    check_identity,
    check_machine,
    check_node,
    check_ports,
    must_fix,
    well,
)
from rollwright.doctor.startup import check_startup
from rollwright.errors import RollwrightError

SOMETHING_TO_FIX = 1

_STYLES = {Health.WELL: "green", Health.NOTE: "yellow", Health.FIX: "bold red"}


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="YAML file. Default: what `rollwright swarm run` would take.",
            show_default=False,
            autocompletion=complete_config,
        ),
    ] = None,
    overrides: Overrides = None,
    home: Annotated[Path | None, typer.Option(help="The node's folder. Default: runs/NAME.")] = None,
    startup: Annotated[
        Path | None,
        typer.Option(
            help="Measure how long a start takes and compare with this file, or make it.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check machine, config, engine and node, and say what to fix: memory, disk, clock, ports, identity and more. Asks
    nothing, changes nothing.

    Exit code 0: nothing must be fixed; 1: something must; 2: the command itself was wrong.
    """
    findings = list(_findings(config, list(overrides or []), home, startup))
    if as_json:
        rows = [asdict(each) for each in findings]
        typer.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
    else:
        _show(findings)
    if any(each.health is Health.FIX for each in findings):
        raise typer.Exit(SOMETHING_TO_FIX)


def _findings(
    file: Path | None, overrides: list[str], home: Path | None, startup: Path | None
) -> Iterator[Finding]:
    settings: RunConfig | None = None
    place = home or RUNS / "swarm"
    try:
        settings, place = node_settings(file, overrides, home)
        yield well("config", f"{file or 'the shipped configuration'} is accepted")
    except RollwrightError as error:
        yield must_fix(
            "config", str(error), "correct the file; `rollwright config show FILE --origin` shows the rest"
        )
    yield from check_machine(place)
    yield from check_boxes()
    yield from check_clock(place)
    if settings is not None:
        yield from check_engine(settings)
        yield from check_ports(settings, place)
    yield from check_identity(place)
    yield from check_node(place)
    if startup is not None:
        yield from check_startup(startup)


def _show(findings: list[Finding]) -> None:
    table = Table(show_lines=False)
    table.add_column("about", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what was found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for each in findings:
        health = Text(str(each.health), style=_STYLES[each.health])
        table.add_row(each.about, health, Text(each.what), Text(each.fix))
    screen = console()
    screen.print(table)
    fixes = sum(each.health is Health.FIX for each in findings)
    screen.print(f"{fixes} to fix" if fixes else "nothing to fix", highlight=False)
