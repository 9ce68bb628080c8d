"""Trains a whole run, or the rest of one, into its folder: the live view, the tables at the end, the summary.

Always true: whichever way it ends, the summary is written, and says whether the training was interrupted or failed.
Imported when a training begins, and not before.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from rollwright.aio import INTERRUPTS
from rollwright.cli.condition import refuse_losses, restore_lost_settings, say_repairs, say_shown_steps
from rollwright.cli.console import console, plain_lines
from rollwright.cli.event_loop import absorb_cancellation, run_async
from rollwright.cli.live import TRAINING_REFRESH, LiveDisplay, TrainingView
from rollwright.cli.profile import RecentProfile
from rollwright.cli.report import LEVELS, make_report
from rollwright.cli.run import say_default_policy
from rollwright.cli.run_execution import (
    repair_ended,
    say_changes,
    settings_to_resume,
    summary_of,
    unless_full,
)
from rollwright.cli.tables import ledger_table, training_table, validation_table
from rollwright.config import RunConfig
from rollwright.observe.statistics import batch_row
from rollwright.rollout import Batch
from rollwright.run.build_tasks import record_fingerprints
from rollwright.run.build_training import make_policy
from rollwright.run.engine_check import ask_engine_first
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.model_choice import load_settled
from rollwright.run.reference_scores import Baseline, validation_baselines
from rollwright.run.training import MODEL, Row, TrainingRun
from rollwright.run.training_record import training_rows


def begin(settings: RunConfig, *, runs: Path, store: str | None, live: bool, report: bool) -> None:
    """Trains into a new folder of `runs`; `report`: and makes the report of it."""
    screen = console()
    # what is wrong shows before anything is written
    settings = record_fingerprints(settings)
    settings, policy = load_settled(settings, make_policy, say=plain_lines(screen))
    if policy is not None:
        say_default_policy(settings)
        run_async(ask_engine_first(settings, policy))
    folder, settings = RunFolder.create(runs, settings)
    address = folder.store_address(store)
    recent = RecentProfile(screen, settings, address)
    run = TrainingRun(settings, folder, policy=policy, store=address, row=_profiled(recent))
    _train(run, screen, recent, live=live)
    if report:
        make_report(folder.path, LEVELS, screen)


def go_on(path: Path, changes: Sequence[str] = (), *, store: str | None = None, live: bool = True) -> None:
    """Trains the rest of a run that stopped anywhere."""
    restore_lost_settings(path, store, console())
    reader, screen = RunReader(path), console()
    settings = settings_to_resume(reader, list(changes))
    if _has_ended(reader, settings):
        repair_ended(reader, store)
        _say_ended(path, reader, screen)
        return
    policy = make_policy(settings)
    if policy is not None:
        run_async(ask_engine_first(settings, policy))
    folder = RunFolder.reopen(path)
    if changes:
        folder.keep_settings(settings)
    address = folder.store_address(store)
    say_repairs(folder, screen)
    recent = RecentProfile(screen, settings, address)
    run = TrainingRun(settings, folder, resume=True, policy=policy, store=address, row=_profiled(recent))
    _train(run, screen, recent, live=live)
    refuse_losses(folder)


def _has_ended(reader: RunReader, settings: RunConfig) -> bool:
    """Whether all steps are done that these settings ask for, and the result is there."""
    if not reader.ended or not (reader.path / MODEL).is_dir():
        return False
    done = int((reader.summary() or {}).get("training", {}).get("steps") or 0)
    source = None if settings.training is None else settings.training.from_run
    there_are = settings.max_steps if source is None else len(training_rows(RunReader(Path(source))))
    return done >= min(settings.max_steps, there_are)


def _say_ended(path: Path, reader: RunReader, screen: Console) -> None:
    """Shows what a training run that has ended came to."""
    summary = reader.summary() or {}
    if validations := summary["training"].get("validations"):
        screen.print(validation_table(validations, {}, simulated=summary.get("simulated", False)))
    screen.print(training_table(summary))
    if "ledger" in summary:
        screen.print(ledger_table(summary))
    said = f"{path}: this run has ended, there is nothing to go on with; more by `rollwright show {path}`"
    screen.print(said, soft_wrap=True, highlight=False)


def _profiled(recent: RecentProfile) -> Row:
    """Every batch goes into the profile on its way into the record."""

    def row(mode: str, step: int, seconds: float, batch: Batch) -> dict[str, Any]:
        if mode == "train":
            recent.add(step + 1, batch.trajectories)
        return batch_row(mode, step, seconds, batch)

    return row


def _train(run: TrainingRun, screen: Console, recent: RecentProfile, *, live: bool) -> None:
    if run_async(execute(run, screen, recent, live=live))["interrupted"]:
        raise typer.Exit(INTERRUPTS.exit_code)


async def execute(
    run: TrainingRun, screen: Console, recent: RecentProfile, *, live: bool = True
) -> dict[str, Any]:
    """Trains to the end; returns the summary, which is also in the run folder."""
    started = time.monotonic()
    interrupted = False
    failure: Exception | None = None
    summary: dict[str, Any] = {"name": run.config.name, "simulated": run.is_simulated}
    try:
        view = TrainingView(run)
        async with LiveDisplay(screen, view.table, every=TRAINING_REFRESH, enabled=live, line=view.line):
            await run.run()
    except asyncio.CancelledError:
        interrupted = True
        absorb_cancellation()
    except Exception as error:
        failure = error
        raise
    finally:
        seconds = time.monotonic() - started
        with unless_full(failure):
            if run.local is not None:
                summary |= await summary_of(run.local, run.folder, seconds)
            summary |= {"seconds": round(seconds, 3), "training": run.summary(), "interrupted": interrupted}
            summary["error"] = str(failure) if failure is not None else None
            run.folder.finish(summary)
    _show(run, summary, screen, recent, await validation_baselines(run.config) if run.validations else {})
    return summary


def _show(
    run: TrainingRun,
    summary: dict[str, Any],
    screen: Console,
    recent: RecentProfile,
    beside: dict[str, Baseline],
) -> None:
    if run.validations:
        screen.print(validation_table(run.validations, beside, simulated=run.is_simulated))
    screen.print(training_table(summary))
    if run.local is not None:
        say_changes(run.local, screen)
        screen.print(ledger_table(summary))
    recent.print()
    if summary["interrupted"]:
        screen.print(
            f"[yellow]interrupted:[/] go on with `rollwright train --resume {run.folder.path}`",
            highlight=False,
        )
    say_shown_steps(RunReader(run.folder.path), screen)
    screen.print(f"results: {run.folder.path}", soft_wrap=True, highlight=False)
