"""Reports the condition of a run's files at the end of the command that has read them.

Repairs and a partial record of a killed run are reported beside the results. An unreadable file is an error: the command
shows everything else first, then one line names the missing part, and the exit code is not 0.
"""

from pathlib import Path

from rich.console import Console

from rollwright.cli.console import plain_lines
from rollwright.errors import FormatError
from rollwright.run.folder import CONFIG, RunFolder, RunReader
from rollwright.run.trajectory_log import TRAJECTORIES


def say_shown_steps(reader: RunReader, screen: Console) -> None:
    """Print which steps are left, if some were pruned."""
    if (shown := reader.shown_steps()) is not None:
        screen.print(shown, soft_wrap=True, highlight=False)


def say_condition(reader: RunReader, screen: Console) -> None:
    """Report damage at the end of a command that reads a run; raises an error for unreadable parts."""
    say_shown_steps(reader, screen)
    if reader.cut_off:
        screen.print("[yellow]the last record of the trajectory log is incomplete and was left out[/]")
    if reader.is_damaged:
        raise FormatError(
            "; ".join(reader.problems)
            + f"; `rollwright resume {reader.path}` restores what its store still has"
        )
    for line in reader.problems:
        plain_lines(screen)(line)


def restore_lost_settings(run: Path, store: str | None, screen: Console) -> None:
    """Restore a run's missing configuration from its store, before anything else is done with the run."""
    if not (run / CONFIG).exists() and (run / TRAJECTORIES).is_file():
        from rollwright.cli.event_loop import run_async
        from rollwright.run.recovery import restore_settings

        restored = run_async(restore_settings(run, store))
        if restored is not None:
            plain_lines(screen)(f"{run / CONFIG}: is missing; restored from the run's store")


def say_repairs(folder: RunFolder, screen: Console) -> None:
    """Print the repairs of a reopened folder, and further ones as they happen."""
    say = plain_lines(screen)
    for line in folder.repairs:
        say(line)
    folder.on_repair = say


def refuse_losses(folder: RunFolder) -> None:
    """Raise an error if finished trajectories were lost; called at the end of a resumed run."""
    if folder.lost:
        raise FormatError(
            f"{folder.path}: the run has ended; finished trajectories that were lost: {len(folder.lost):,}"
        )
