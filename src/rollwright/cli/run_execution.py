"""Plays a run, or the rest of one, on a terminal: the live view, the profiles, the tables at the end.

`run.playing` plays; this module only shows. It is imported once the settings are accepted, because it loads everything
that playing needs.
"""

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import typer
from rich.console import Console

from rollwright.cli.condition import refuse_losses, say_repairs, say_shown_steps
from rollwright.cli.console import console
from rollwright.cli.event_loop import run_async
from rollwright.cli.live import RUN_REFRESH, LiveDisplay, RunView
from rollwright.cli.profile import RecentProfile
from rollwright.cli.tables import capability_line, ledger_table, result_table
from rollwright.config import RunConfig
from rollwright.engines.base import Policy
from rollwright.rollout import Batch
from rollwright.run.costs import BudgetReached
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.playing import Progress, RunObserver, play_run
from rollwright.run.recovery import recover
from rollwright.run.run import Run
from rollwright.signals import INTERRUPTS

Result = TypeVar("Result")


class RunScreen(RunObserver):
    """Shows a run while it plays."""

    def __init__(self, screen: Console, recent: RecentProfile, *, live: bool) -> None:
        self._screen = screen
        self._recent = recent
        self._live = live

    @asynccontextmanager
    async def watch_run(self, run: Run, progress: Progress) -> AsyncIterator[None]:
        if run.capabilities is not None:
            self._screen.print(capability_line(run.capabilities), soft_wrap=True, highlight=False)
        say_changes(run, self._screen)
        view = RunView(run, progress)
        async with LiveDisplay(
            self._screen, view.table, every=RUN_REFRESH, enabled=self._live, line=view.line
        ):
            yield

    def on_batch(self, mode: str, step: int, batch: Batch) -> None:
        if mode == "train":
            self._recent.add(step + 1, batch.trajectories)


class PlayOptions(TypedDict):
    """Where and how a run is played; see `run.playing.play_run`."""

    store: str | None
    workers: int | None
    ray: str | None
    policy: Policy | None
    resume: bool


def execute(config: RunConfig, folder: RunFolder, *, live: bool, **options: Unpack[PlayOptions]) -> None:
    """Play the run and show its results; exits with the signal's code after an interruption."""
    screen = console()
    summary, recent = play_on_screen(play_run, config, folder, live, options)
    screen.print(result_table(summary))
    screen.print(ledger_table(summary))
    recent.print()
    say_end(summary, folder.path, screen)
    say_shown_steps(RunReader(folder.path), screen)
    screen.print(f"results: {folder.path}", soft_wrap=True, highlight=False)
    exit_unless_done(summary, folder)


def play_on_screen(
    play: Callable[..., Coroutine[Any, Any, Result]],
    config: RunConfig,
    folder: RunFolder,
    live: bool,
    options: PlayOptions,
) -> tuple[Result, RecentProfile]:
    """Play with a live view, by `play_run` or a function like it; returns its result and the last batches' profile."""
    screen = console()
    say_repairs(folder, screen)
    recent = RecentProfile(screen, config, folder.store_address(options["store"]))
    return run_async(play(config, folder, observer=RunScreen(screen, recent, live=live), **options)), recent


def exit_unless_done(summary: Mapping[str, Any], folder: RunFolder) -> None:
    """Exit with the code of an interruption, or of lost results, if there is either."""
    if summary["interrupted"]:
        raise typer.Exit(end_code(summary))
    refuse_losses(folder)


def say_end(summary: Mapping[str, Any], path: Path, screen: Console, command: str = "resume") -> None:
    """Print why a run has ended before its work was done, and how it goes on."""
    if summary.get("stopped") is not None:
        screen.print(
            f"[yellow]stopped:[/] {summary['stopped']}; raise the limit and resume with `rollwright resume {path} budget.…=…`",
            soft_wrap=True,
            highlight=False,
        )
    elif summary["interrupted"]:
        screen.print(f"[yellow]interrupted:[/] resume with `rollwright {command} {path}`", highlight=False)


def end_code(summary: Mapping[str, Any]) -> int:
    """Exit code of a run that has ended before its work was done."""
    return INTERRUPTS.exit_code if summary.get("stopped") is None else BudgetReached.exit_code


def say_changes(run: Run, screen: Console) -> None:
    """Print the settings that differ from those that the run was started with."""
    for change in run.changes:
        screen.print(f"resumed with another setting: {change}", soft_wrap=True, highlight=False)


def say_ended(run: Path, reader: RunReader, screen: Console) -> None:
    """Print the results of a run that has ended."""
    summary = reader.summary() or {}
    if summary.get("results"):
        screen.print(result_table(summary))
    if "ledger" in summary:
        screen.print(ledger_table(summary))
    say_nothing_left(run, screen)


def say_nothing_left(run: Path, screen: Console) -> None:
    line = f"{run}: this run has ended, nothing is left to resume; see `rollwright show {run}`"
    screen.print(line, soft_wrap=True, highlight=False)


def repair_ended(reader: RunReader, store: str | None) -> None:
    """Repair the files of a run that has nothing left to play."""
    for _ in reader.trajectories():
        pass
    reader.failures()
    if not reader.problems:
        return
    folder = RunFolder.reopen(reader.path)
    say_repairs(folder, console())
    run_async(recover(folder, folder.store_address(store), reader.config))
    folder.log.close()
    refuse_losses(folder)
