"""The terminal, or what stands in for it."""

from collections.abc import Callable

import typer
from rich.console import Console

from rollwright.addresses import has_password, redacted

PIPED_WIDTH = 110
"""Columns where there is no terminal to ask: tables of results fit, and logs stay readable."""


def console() -> Console:
    found = Console()
    return found if found.is_terminal else Console(width=PIPED_WIDTH)


def plain_lines(screen: Console) -> Callable[[str], None]:
    """Says something on the screen as it stands: no colours for what looks like a number, no breaks."""
    return lambda line: screen.print(line, highlight=False, soft_wrap=True, markup=False)


def say_aside(line: str) -> None:
    """On standard error, beside what the command answers."""
    typer.echo(line, err=True)


def warn_of_password(context: typer.Context, option: typer.CallbackParam, address: str | None) -> str | None:
    """Says so if an address was given with a password where every user of the machine can read it."""
    source = context.get_parameter_source(option.name or "")
    given = source is not None and source.name == "COMMANDLINE"
    if address is not None and given and not context.resilient_parsing and has_password(address):
        typer.echo(
            f"--store {redacted(address)}: arguments can be read by every user of this machine; "
            "give the password by PGPASSWORD or a password file",
            err=True,
        )
    return address
