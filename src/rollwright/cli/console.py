"""The terminal, or what stands in for it."""

from collections.abc import Callable

from rich.console import Console

PIPED_WIDTH = 110
"""Columns where there is no terminal to ask: tables of results fit, and logs stay readable."""


def console() -> Console:
    found = Console()
    return found if found.is_terminal else Console(width=PIPED_WIDTH)


def plain_lines(screen: Console) -> Callable[[str], None]:
    """Says something on the screen as it stands: no colours for what looks like a number, no breaks."""
    return lambda line: screen.print(line, highlight=False, soft_wrap=True, markup=False)
