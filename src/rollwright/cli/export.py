"""`rollwright export`: a run's trajectories as a table for other tools."""

from pathlib import Path
from typing import Annotated

import typer

from rollwright.cli.condition import say_condition
from rollwright.cli.console import console
from rollwright.errors import RollwrightError
from rollwright.run.folder import RunReader

FORMATS = ("parquet",)


def export(
    run: Annotated[Path, typer.Argument(help="Run folder.", show_default=False)],
    to: Annotated[str, typer.Option(help="Format: parquet.")] = "parquet",
    output: Annotated[
        Path | None, typer.Option(help="File. Default: in the run folder.", show_default=False)
    ] = None,
) -> None:
    """Write RUN's trajectories to a file: one row for each turn, with the exact token ids."""
    if to not in FORMATS:
        raise RollwrightError(f"--to {to}: unknown format; known: {', '.join(FORMATS)}")
    from rollwright.run.export import write_parquet

    reader = RunReader(run)
    file = output or run / f"trajectories.{to}"
    rows = write_parquet(reader.trajectories(), file)
    console().print(f"{rows:,} turns written to {file}", highlight=False)
    say_condition(reader, console())
