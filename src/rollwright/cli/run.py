"""`rollwright run`: plays what a configuration asks for and leaves the results in one folder."""

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rollwright.cli.console import console
from rollwright.cli.event_loop import run_async
from rollwright.cli.live import LiveView
from rollwright.cli.tables import ledger_table, result_table
from rollwright.config import RunConfig, load
from rollwright.observe.statistics import RunStatistics, activity_row, batch_row
from rollwright.run.baselines import baseline
from rollwright.run.folder import RunFolder
from rollwright.run.local import LocalRun


def run(
    config: Annotated[Path, typer.Argument(help="YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings that win over the file: key.path=value …", show_default=False),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder that holds the run folders.")] = Path("runs"),
    live: Annotated[bool, typer.Option(help="Show what happens while it happens.")] = True,
) -> None:
    """Play the episodes that CONFIG asks for. Ctrl-C ends cleanly and keeps what is done."""
    screen = console()
    outcome = run_async(execute(load(config, overrides or []), runs, screen, live=live))
    if outcome["interrupted"]:
        raise typer.Exit(130)


async def execute(config: RunConfig, runs: Path, screen: Console, *, live: bool = True) -> dict[str, Any]:
    """Plays a whole run; returns its summary, which is also in the run folder."""
    prepared = LocalRun(config)
    folder = RunFolder.create(runs, config)
    prepared.on_finished, prepared.on_failed = folder.add_trajectory, folder.add_failure
    statistics = RunStatistics()
    started = time.monotonic()
    interrupted = False
    failure: Exception | None = None
    try:
        async with prepared as running, LiveView(running, screen, enabled=live):
            await _collect(running, folder, statistics)
    except asyncio.CancelledError:
        interrupted = True
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
    except Exception as error:
        failure = error
        raise
    finally:
        summary = await _summary(prepared, statistics, time.monotonic() - started)
        summary["interrupted"] = interrupted
        summary["error"] = str(failure) if failure is not None else None
        folder.finish(summary)
    screen.print(result_table(summary))
    screen.print(ledger_table(summary))
    if interrupted:
        screen.print("[yellow]interrupted:[/] what was finished is kept")
    screen.print(f"results: {folder.path}", soft_wrap=True, highlight=False)
    return summary


async def _collect(running: LocalRun, folder: RunFolder, statistics: RunStatistics) -> None:
    """All batches, with validation where it is due, alongside the rollouts."""
    config = running.config
    validations: list[asyncio.Task[None]] = []

    async def validate(step: int) -> None:
        began = time.monotonic()
        batch = await running.evaluate(step)
        statistics.add("val", batch.trajectories)
        folder.add_metrics(
            batch_row("val", step, time.monotonic() - began, batch, running.schedulers[-1].ledger)
        )

    try:
        for step in range(config.max_steps if config.train_env_manager else 0):
            began = time.monotonic()
            batch = await running.get_batch()
            statistics.add("train", batch.trajectories)
            folder.add_metrics(
                batch_row("train", step, time.monotonic() - began, batch, running.schedulers[0].ledger)
            )
            due = config.eval_steps is not None and (step + 1) % config.eval_steps == 0
            if config.val_env_manager and due and step + 1 < config.max_steps:
                validations.append(asyncio.create_task(validate(step + 1)))
        if config.val_env_manager:
            validations.append(
                asyncio.create_task(validate(config.max_steps if config.train_env_manager else 0))
            )
        await asyncio.gather(*validations)
    finally:
        for task in validations:
            task.cancel()
        await asyncio.gather(*validations, return_exceptions=True)


async def _summary(run: LocalRun, statistics: RunStatistics, seconds: float) -> dict[str, Any]:
    baselines = {
        (mode, tag): await baseline(tag, list(played.levels), run.config.seed, run.settings)
        for (mode, tag), played in statistics.tags.items()
    }
    places: dict[str, int] = {}
    reasons: dict[str, int] = {}
    for scheduler in run.schedulers:
        for place, count in scheduler.ledger.counts.items():
            places[str(place)] = places.get(str(place), 0) + count
        for reason, count in scheduler.ledger.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return {
        "name": run.config.name,
        "seconds": round(seconds, 3),
        "results": statistics.rows(baselines),
        "ledger": {"opened": sum(places.values()), **places},
        "reasons": reasons,
        "activity": activity_row(run.activity),
    }
