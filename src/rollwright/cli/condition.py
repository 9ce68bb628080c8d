"""The condition of a run's files, told by the command that has read them.

Repairs, and half a record that a killed run left, are told beside the results. A file that cannot be read is an error:
everything else is shown first, then one line says what is missing, and the exit code is not 0.
"""

from pathlib import Path

from rich.console import Console

from rollwright.cli.console import plain_lines
from rollwright.errors import FormatError
from rollwright.run.folder import CONFIG, RunFolder, RunReader
from rollwright.run.trajectory_log import TRAJECTORIES


def say_shown_steps(reader: RunReader, screen: Console) -> None:
    """Says which steps a run still has, where retention has removed some."""
    if (shown := reader.shown_steps()) is not None:
        screen.print(shown, soft_wrap=True, highlight=False)


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


def restore_lost_settings(run: Path, store: str | None, screen: Console) -> None:
    """Of a run whose configuration is gone, before anything else is done with it."""
    if not (run / CONFIG).exists() and (run / TRAJECTORIES).is_file():
        from rollwright.cli.event_loop import run_async
        from rollwright.run.recovery import restore_settings

        restored = run_async(restore_settings(run, store))
        if restored is not None:
            plain_lines(screen)(f"{run / CONFIG}: is missing; taken from the run's store")


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
            f"{folder.path}: all that is left is done; finished trajectories that were lost: {len(folder.lost):,}"
        )
