"""`rollwright envs`: what can be played."""

from rich.table import Table

from rollwright.cli.console import console
from rollwright.envs import registry


def envs() -> None:
    """List the environments by tag."""
    table = Table(title="environments", title_justify="left")
    table.add_column("tag", no_wrap=True)
    table.add_column("what it is")
    table.add_column("actions", justify="right")
    for tag in registry.tags():
        spec = registry.spec(tag)
        table.add_row(tag, spec.description, str(spec.max_steps))
    for prefix, meaning in registry.PREFIXES.items():
        table.add_row(f"{prefix}:…", meaning, "")
    console().print(table)
