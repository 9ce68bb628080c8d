"""`rollwright run`: plays what a configuration asks for and leaves the results in one folder."""

import asyncio
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from rollwright.cli.console import console, plain_lines
from rollwright.cli.event_loop import run_async
from rollwright.cli.live import REFRESH_SECONDS, RunView
from rollwright.cli.profile import RecentProfile
from rollwright.cli.redrawn import Redrawn
from rollwright.cli.tables import capability_line, ledger_table, result_table
from rollwright.config import RunConfig, load
from rollwright.observe.statistics import RunStatistics, activity_row, batch_row
from rollwright.observe.trees import TreeSums
from rollwright.observe.views import ViewSizes
from rollwright.policies.base import Policy
from rollwright.rollout.causes import FailureCauses
from rollwright.run.baselines import baseline
from rollwright.run.engine_check import ask_engine_first
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.local import LocalRun
from rollwright.run.model_choice import settle_model
from rollwright.run.training_record import is_training

RayOption = Annotated[
    str | None,
    typer.Option(
        help="Play on a Ray cluster: auto, local or HOST:PORT. --workers is then the most actors.",
        show_default=False,
    ),
]


def run(
    config: Annotated[Path, typer.Argument(help="YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings that win over the file: key.path=value …", show_default=False),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder that holds the run folders.")] = Path("runs"),
    store: Annotated[
        str | None,
        typer.Option(
            help="Where rollouts are kept: memory, a path, postgresql://…, http://… Default: in the run folder."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Most worker processes. Default: this process plays.")
    ] = None,
    ray: RayOption = None,
    live: Annotated[bool, typer.Option(help="Show what happens while it happens.")] = True,
) -> None:
    """Play the episodes that CONFIG asks for. Ctrl-C ends cleanly; `rollwright resume` goes on from there."""
    settings = settle_model(load(config, overrides or []), say=plain_lines(console()))
    # what is wrong with the settings, or with the engine, shows before anything is written
    prepared = LocalRun(settings, ray=ray)
    run_async(ask_engine_first(settings, prepared.policy))
    folder, settings = RunFolder.create(runs, prepared.config)
    policy = prepared.policy if workers is None and ray is None else None
    del prepared  # a model in this process is loaded once, and only where it plays
    _play(settings, folder, Progress(), store, workers, ray=ray, live=live, policy=policy)


def resume(
    run: Annotated[Path, typer.Argument(help="Run folder.", show_default=False)],
    store: Annotated[str | None, typer.Option(help="The store that the run used, if not its own.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Most worker processes.")] = None,
    ray: RayOption = None,
    live: Annotated[bool, typer.Option(help="Show what happens while it happens.")] = True,
) -> None:
    """Go on with RUN where it stopped: nothing that was finished is played again, no recorded token is paid twice."""
    reader = RunReader(run)
    if is_training(run):
        # imported here, because training is told in terms of a run
        from rollwright.cli.train import go_on

        go_on(run, store=store, live=live)
        return
    if reader.ended:
        said = f"{run}: has ended, there is nothing to go on with; see `rollwright show {run}`"
        console().print(said, soft_wrap=True, highlight=False)
        return
    run_async(ask_engine_first(reader.config))
    _play(reader.config, RunFolder.reopen(run), Progress.of(reader), store, workers, ray=ray, live=live)


def _play(
    settings: RunConfig,
    folder: RunFolder,
    progress: "Progress",
    store: str | None,
    workers: int | None,
    *,
    ray: str | None,
    live: bool,
    policy: Policy | None = None,
) -> None:
    call = execute(
        settings,
        folder,
        console(),
        progress=progress,
        store=folder.store_address(store),
        workers=workers,
        ray=ray,
        live=live,
        policy=policy,
    )
    if run_async(call)["interrupted"]:
        raise typer.Exit(130)


@dataclass
class Progress:
    """What of a run is done already."""

    steps: int = 0
    validations: set[int] = field(default_factory=set)
    delivered: list[str] | None = None
    """Training groups that were handed out; `None` for a run that starts."""

    @classmethod
    def of(cls, reader: RunReader) -> "Progress":
        rows = reader.metrics()
        train = [row for row in rows if row["mode"] == "train"]
        return cls(
            steps=len(train),
            validations={row["step"] for row in rows if row["mode"] == "val"},
            delivered=[group for row in train for group in row["groups"]],
        )


async def execute(
    config: RunConfig,
    folder: RunFolder,
    screen: Console,
    *,
    progress: Progress | None = None,
    store: str | None = None,
    workers: int | None = None,
    ray: str | None = None,
    live: bool = True,
    policy: Policy | None = None,
) -> dict[str, Any]:
    """Plays a whole run, or the rest of one; returns its summary, which is also in the run folder."""
    progress = progress or Progress()
    running = LocalRun(
        config,
        policy=policy,
        store=store,
        processes=workers,
        ray=ray,
        delivered=progress.delivered,
        on_finished=folder.add_trajectory,
        on_failed=folder.add_failure,
    )
    recent = RecentProfile(screen, config, store)
    started = time.monotonic()
    interrupted = False
    failure: Exception | None = None
    try:
        async with running:
            if running.capabilities is not None:
                screen.print(capability_line(running.capabilities), soft_wrap=True, highlight=False)
            view = RunView(running, progress)
            async with Redrawn(screen, view.table, every=REFRESH_SECONDS, enabled=live, line=view.line):
                await _collect(running, folder, progress, recent)
    except asyncio.CancelledError:
        interrupted = True
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
    except Exception as error:
        failure = error
        raise
    finally:
        summary = await summary_of(running, folder, time.monotonic() - started)
        summary["resumed"] = progress.delivered is not None
        summary["interrupted"] = interrupted
        summary["error"] = str(failure) if failure is not None else None
        folder.finish(summary)
    screen.print(result_table(summary))
    screen.print(ledger_table(summary))
    recent.print()
    if interrupted:
        screen.print(f"[yellow]interrupted:[/] go on with `rollwright resume {folder.path}`", highlight=False)
    screen.print(f"results: {folder.path}", soft_wrap=True, highlight=False)
    return summary


async def _collect(running: LocalRun, folder: RunFolder, progress: Progress, recent: RecentProfile) -> None:
    """All batches that are left, with validation where it is due, alongside the rollouts."""
    config = running.config
    validations: list[asyncio.Task[None]] = []

    async def validate(step: int) -> None:
        began = time.monotonic()
        batch = await running.evaluate(step)
        row = batch_row("val", step, time.monotonic() - began, batch)
        folder.add_metrics(row)

    def validate_beside(step: int) -> None:
        if config.val_env_manager and step not in progress.validations:
            validations.append(asyncio.create_task(validate(step)))

    steps = config.max_steps if config.train_env_manager else 0
    try:
        for step in range(progress.steps, steps):
            began = time.monotonic()
            batch = await running.get_batch()
            row = batch_row("train", step, time.monotonic() - began, batch)
            folder.add_metrics(row)
            progress.steps = step + 1
            recent.add(step + 1, batch.trajectories)
            if config.eval_steps is not None and (step + 1) % config.eval_steps == 0 and step + 1 < steps:
                validate_beside(step + 1)
        validate_beside(steps)
        await asyncio.gather(*validations)
    finally:
        for task in validations:
            task.cancel()
        await asyncio.gather(*validations, return_exceptions=True)


def failure_causes(reader: RunReader) -> FailureCauses:
    """Why rollouts failed for good, over the whole run."""
    causes = FailureCauses()
    for row in reader.failures():
        causes.add(row["reason"], row["rollout_id"])
    return causes


async def summary_of(run: LocalRun, folder: RunFolder, seconds: float) -> dict[str, Any]:
    """What a run came to: results by mode and tag with chance and perfect play, and where every rollout went."""
    statistics, views, trees = RunStatistics(), ViewSizes(), TreeSums()
    reader = RunReader(folder.path)
    batches = reader.metrics()
    modes = {group: row["mode"] for row in batches for group in row["groups"]}
    for trajectory in folder.trajectories():
        mode = modes.get(trajectory.group_id)
        if mode is not None:
            statistics.add(mode, [trajectory])
        if mode == "train":
            views.add(trajectory)
            trees.add(trajectory)
    baselines = {
        (mode, tag): await baseline(tag, list(played.levels), run.config.seed, run.settings)
        for (mode, tag), played in statistics.tags.items()
    }
    ledger = run.ledger
    return {
        "name": run.config.name,
        "seconds": round(seconds, 3),
        "results": statistics.rows(baselines),
        "ledger": {"opened": ledger.opened, **{str(place): count for place, count in ledger.counts.items()}},
        "reasons": ledger.reasons,
        "failures": failure_causes(reader).rows(),
        "filters": {name: asdict(catch) for name, catch in ledger.catches.by_filter.items()},
        "views": views.row(),
        "trees": trees.row(),
        "activity": activity_row(run.activity),
        "engine": None if run.capabilities is None else msgspec.to_builtins(run.capabilities),
    }
