"""What is wrong with a run's files, told by whoever has looked at them.

What was put right, and half a record that a killed run left, are said beside the results. What cannot be read is an
error: everything else is shown first, then one line says what is missing, and the exit code is not 0.
"""

from rich.console import Console

from rollwright.cli.console import plain_lines
from rollwright.cli.tables import say_shown_steps
from rollwright.errors import FormatError
from rollwright.run.folder import RunFolder, RunReader


def say_condition(reader: RunReader, screen: Console) -> None:
    """At the end of a command that reads a run."""
    say_shown_steps(reader, screen)
    if reader.cut_off:
        screen.print("[yellow]the last record of the trajectory log is incomplete and was left out[/]")
    if reader.is_damaged:
        raise FormatError(
            "; ".join(reader.problems)
            + f"; `rollwright resume {reader.path}` brings back what its store still has"
        )
    for line in reader.problems:
        plain_lines(screen)(line)


def say_repairs(folder: RunFolder, screen: Console) -> None:
    """At the beginning of one that goes on with a run; further ones are said as they come."""
    say = plain_lines(screen)
    for line in folder.repairs:
        say(line)
    folder.on_repair = say


def refuse_losses(folder: RunFolder) -> None:
    """At its end."""
    if folder.lost:
        raise FormatError(
            f"{folder.path}: {len(folder.lost):,} finished trajectories were lost; all else is done"
        )
