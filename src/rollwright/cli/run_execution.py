"""Plays a whole run, or the rest of one, into its folder: batches, validations, the live view, the summary.

Always true: whichever way it ends, the summary is written, and says whether the run was interrupted or failed. Imported
when a run is played, and not before: it loads everything that playing needs.
"""

import asyncio
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from rollwright.cli.condition import refuse_losses, say_repairs, say_shown_steps
from rollwright.cli.console import console
from rollwright.cli.event_loop import absorb_cancellation, run_async
from rollwright.cli.live import RUN_REFRESH, LiveDisplay, RunView
from rollwright.cli.profile import RecentProfile
from rollwright.cli.tables import capability_line, ledger_table, result_table
from rollwright.config import RunConfig, build
from rollwright.config.resuming import check_resumable
from rollwright.engines.base import Policy
from rollwright.observe.sample_views import TreeSums, ViewSizes
from rollwright.observe.statistics import RunStatistics, activity_row, batch_row
from rollwright.rollout import Ledger
from rollwright.rollout.accounting import FailureCauses
from rollwright.run.build_teams import build_run_policy
from rollwright.run.config_check import check_config
from rollwright.run.engine_check import ask_engine_first
from rollwright.run.folder import CONFIG, RunFolder, RunReader
from rollwright.run.pruning import BatchRetention
from rollwright.run.recovery import recover
from rollwright.run.reference_scores import baseline
from rollwright.run.retention import Forgotten
from rollwright.run.run import Run
from rollwright.run.validations import due_validations, recorded_validations


@dataclass
class Progress:
    """The part of a run that is done already."""

    steps: int = 0
    done: set[int] = field(default_factory=set)
    """The steps that are done; one may be missing in between, where its line was damaged."""
    validations: dict[int, Ledger] = field(default_factory=dict)
    """Finished validations, with the ledger of each."""
    delivered: list[str] | None = None
    """Training groups that were handed out; `None` for a run that starts."""
    forgotten: Forgotten = field(default_factory=Forgotten)
    """What retention has removed from the folder."""

    @classmethod
    def of(cls, reader: RunReader) -> "Progress":
        rows, forgotten = reader.metrics(), reader.forgotten()
        train = [row for row in rows if row["mode"] == "train"]
        return cls(
            steps=forgotten.steps + len(train),
            done={*range(forgotten.steps), *(row["step"] for row in train)},
            validations=recorded_validations(rows),
            delivered=[*forgotten.delivered, *(group for row in train for group in row["groups"])],
            forgotten=forgotten,
        )

    def is_complete(self, config: RunConfig) -> bool:
        """Whether nothing is left to play."""
        steps = config.max_steps if config.train_env_manager else 0
        validated = config.val_env_manager is None or steps in self.validations or self.steps > steps
        return self.steps >= steps and validated and not self.due(config)

    def due(self, config: RunConfig) -> list[int]:
        """Validations that should have been played by now, between the batches."""
        if config.val_env_manager is None:
            return []
        due = due_validations(min(self.steps, config.max_steps - 1), config.eval_steps, self.validations)
        return [number for number in due if number >= self.forgotten.steps]


def prepare(config: RunConfig, workers: int | None, ray: str | None) -> Policy | None:
    """Says what is wrong with the settings or the engine before anything is written; returns the policy if this process
    plays, so that a model in it is loaded once."""
    check_config(config, ray=ray)
    policy = build_run_policy(config) if workers is None and ray is None else None
    run_async(ask_engine_first(config, policy))
    return policy


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
    retention = BatchRetention(config, folder, progress.forgotten)
    running = Run(
        config,
        policy=policy,
        store=store,
        processes=workers,
        ray=ray,
        delivered=progress.delivered,
        validated=progress.validations,
        forgotten=retention.forgotten if retention.is_on else None,
        folder=folder,
        on_finished=folder.add_trajectory,
        on_failed=folder.add_failure,
    )
    recent = RecentProfile(screen, config, store)
    started = time.monotonic()
    interrupted = False
    failure: Exception | None = None
    try:
        if progress.delivered is not None and store is not None:
            await recover(folder, store, config)
        async with running:
            if running.capabilities is not None:
                screen.print(capability_line(running.capabilities), soft_wrap=True, highlight=False)
            say_changes(running, screen)
            view = RunView(running, progress)
            async with LiveDisplay(screen, view.table, every=RUN_REFRESH, enabled=live, line=view.line):
                await _collect(running, folder, progress, recent, retention)
    except asyncio.CancelledError:
        interrupted = True
        absorb_cancellation()
    except Exception as error:
        failure = error
        raise
    finally:
        with unless_full(failure):
            summary = await summary_of(running, folder, time.monotonic() - started)
            summary["resumed"] = progress.delivered is not None
            summary["lost"] = len(folder.lost)
            summary["interrupted"] = interrupted
            summary["error"] = str(failure) if failure is not None else None
            folder.finish(summary)
    screen.print(result_table(summary))
    screen.print(ledger_table(summary))
    recent.print()
    if interrupted:
        screen.print(f"[yellow]interrupted:[/] go on with `rollwright resume {folder.path}`", highlight=False)
    say_shown_steps(RunReader(folder.path), screen)
    screen.print(f"results: {folder.path}", soft_wrap=True, highlight=False)
    return summary


def unless_full(failure: Exception | None) -> AbstractContextManager[None]:
    """A disk that has no room for the summary either must not hide what the run ended with."""
    return nullcontext() if failure is None else suppress(OSError)


async def _collect(
    running: Run,
    folder: RunFolder,
    progress: Progress,
    recent: RecentProfile,
    retention: BatchRetention,
) -> None:
    """All batches that are left, with validation where it is due, alongside the rollouts. Validations that an earlier
    process had begun, or should have, come first."""
    config = running.config
    under_way: set[int] = set()
    validations: dict[int, asyncio.Task[None]] = {}

    async def validate(step: int) -> None:
        began = time.monotonic()
        under_way.add(step)
        batch = await running.evaluate(step)
        row = batch_row("val", step, time.monotonic() - began, batch)
        folder.add_metrics(row)
        under_way.discard(step)

    def validate_beside(step: int) -> None:
        if config.val_env_manager and step not in progress.validations and step not in validations:
            validations[step] = asyncio.create_task(validate(step))

    steps = config.max_steps if config.train_env_manager else 0
    try:
        for number in sorted({*running.unfinished_validations, *progress.due(config)}):
            validate_beside(number)
        for step in range(steps):
            if step in progress.done:
                continue
            began = time.monotonic()
            batch = await running.get_batch()
            row = batch_row("train", step, time.monotonic() - began, batch)
            folder.add_metrics(row)
            progress.steps = step + 1
            recent.add(step + 1, batch.trajectories)
            if config.eval_steps is not None and (step + 1) % config.eval_steps == 0 and step + 1 < steps:
                validate_beside(step + 1)
            await retention.forget(running, step + 1, under_way)
        validate_beside(steps)
        await asyncio.gather(*validations.values())
    finally:
        for task in validations.values():
            task.cancel()
        await asyncio.gather(*validations.values(), return_exceptions=True)


def failure_causes(reader: RunReader) -> FailureCauses:
    """Why rollouts failed for good, over the whole run."""
    causes = FailureCauses()
    for row in reader.failures():
        causes.add(row["reason"], row["rollout_id"])
    return causes


async def summary_of(run: Run, folder: RunFolder, seconds: float) -> dict[str, Any]:
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
        "simulated": run.config.plays_simulated,
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


def settings_to_resume(reader: RunReader, overrides: list[str]) -> RunConfig:
    """A run's own settings with these changes; those that would change what it plays are refused."""
    before = reader.config
    if not overrides:
        return before
    settings = build(before.model_dump(mode="json"), overrides, source=str(reader.path / CONFIG))
    check_resumable(before, settings)
    return settings


def say_changes(running: Run, screen: Console) -> None:
    """Says which settings differ from those that the run was begun with."""
    for change in running.changes:
        screen.print(f"resumed with another setting: {change}", soft_wrap=True, highlight=False)


def say_ended(run: Path, reader: RunReader, screen: Console) -> None:
    """Shows what a run that has ended came to."""
    summary = reader.summary() or {}
    if summary.get("results"):
        screen.print(result_table(summary))
    if "ledger" in summary:
        screen.print(ledger_table(summary))
    said = f"{run}: this run has ended, there is nothing to go on with; more by `rollwright show {run}`"
    screen.print(said, soft_wrap=True, highlight=False)


def repair_ended(reader: RunReader, store: str | None) -> None:
    """Repairs the files of a run that has nothing left to play."""
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
