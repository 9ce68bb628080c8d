"""The terminal, and arguments that several commands share. Light, because every command imports it."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollwright.addresses import has_password, redacted

PIPED_WIDTH = 110
"""Columns without a terminal: result tables fit, and logs stay readable."""

RUNS = Path("runs")
"""Default folder of the run folders."""


def console() -> Console:
    found = Console()
    return found if found.is_terminal else Console(width=PIPED_WIDTH)


def plain_lines(screen: Console) -> Callable[[str], None]:
    """Function that prints a line unchanged: without highlighting, markup or line breaks."""
    return lambda line: screen.print(line, highlight=False, soft_wrap=True, markup=False)


def say_aside(line: str) -> None:
    """Print a line on standard error, apart from the command's output."""
    typer.echo(line, err=True)


def warn_of_password(context: typer.Context, option: typer.CallbackParam, address: str | None) -> str | None:
    """Warn about a password in an argument, which every user of the machine can read."""
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
    """Format seconds as M:SS or H:MM:SS."""
    whole = round(seconds)
    minutes, hours = whole // 60 % 60, whole // 3600
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def complete_run(incomplete: str) -> list[str]:
    """Complete a run folder: of `runs/`, or of the folder that is typed already."""
    typed = Path(incomplete)
    inside = typed if incomplete.endswith("/") else typed.parent
    folders = {*inside.glob("*/"), *RUNS.glob("*/")}
    found = (str(each) for each in folders if (each / "config.yaml").is_file())
    return sorted(each for each in found if each.startswith(incomplete))


def complete_config(incomplete: str) -> list[str]:
    """Complete a YAML file or a folder."""
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
