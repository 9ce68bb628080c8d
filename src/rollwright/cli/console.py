"""The terminal, or what stands in for it; and what arguments of several commands share.

Light: every command imports it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollwright.addresses import has_password, redacted

PIPED_WIDTH = 110
"""Columns where there is no terminal to ask: tables of results fit, and logs stay readable."""

RUNS = Path("runs")
"""The folder that holds run folders, unless a command is told otherwise."""


def console() -> Console:
    found = Console()
    return found if found.is_terminal else Console(width=PIPED_WIDTH)


def plain_lines(screen: Console) -> Callable[[str], None]:
    """Prints a line as it stands: no colours for what looks like a number, no line breaks."""
    return lambda line: screen.print(line, highlight=False, soft_wrap=True, markup=False)


def say_aside(line: str) -> None:
    """Prints a line on standard error, beside what the command answers."""
    typer.echo(line, err=True)


def warn_of_password(context: typer.Context, option: typer.CallbackParam, address: str | None) -> str | None:
    """Warns of an address that was given with a password where every user of the machine can read it."""
    source = context.get_parameter_source(option.name or "")
    given = source is not None and source.name == "COMMANDLINE"
    if address is not None and given and not context.resilient_parsing and has_password(address):
        typer.echo(
            f"--store {redacted(address)}: arguments can be read by every user of this machine; "
            "give the password by PGPASSWORD or a password file",
            err=True,
        )
    return address


def clock_time(seconds: float) -> str:
    """Hours, minutes and seconds; the hours only where there are some."""
    whole = round(seconds)
    minutes, hours = whole // 60 % 60, whole // 3600
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def complete_run(incomplete: str) -> list[str]:
    """Run folders that begin so: those of `runs/`, or of another folder that is typed already."""
    typed = Path(incomplete)
    inside = typed if incomplete.endswith("/") else typed.parent
    folders = {*inside.glob("*/"), *RUNS.glob("*/")}
    found = (str(each) for each in folders if (each / "config.yaml").is_file())
    return sorted(each for each in found if each.startswith(incomplete))


def complete_config(incomplete: str) -> list[str]:
    """YAML files that begin so, and folders on the way to one."""
    typed = Path(incomplete)
    inside = typed if incomplete.endswith("/") else typed.parent
    files = [str(each) for each in inside.glob("*.y*ml")]
    folders = [f"{each}/" for each in inside.glob("*/") if not each.name.startswith(".")]
    return sorted(each for each in (*files, *folders) if each.startswith(incomplete))


RunArgument = Annotated[
    Path, typer.Argument(help="Run folder.", show_default=False, autocompletion=complete_run)
]
ConfigArgument = Annotated[
    Path, typer.Argument(help="YAML file.", show_default=False, autocompletion=complete_config)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings that win over the file: key.path=value …", show_default=False),
]
