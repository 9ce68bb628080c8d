"""The terminal, or what stands in for it."""

from rich.console import Console

PIPED_WIDTH = 110
"""Columns where there is no terminal to ask: tables of results fit, and logs stay readable."""


def console() -> Console:
    found = Console()
    return found if found.is_terminal else Console(width=PIPED_WIDTH)
