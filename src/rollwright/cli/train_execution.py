"""Trains a run, or the rest of one, on a terminal: the live view, the profiles, the tables at the end.

`run.training` trains; this module only shows. It is imported once the settings are accepted.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from rollwright.cli.condition import refuse_losses, restore_lost_settings, say_repairs, say_shown_steps
from rollwright.cli.console import console, plain_lines
from rollwright.cli.event_loop import run_async
from rollwright.cli.live import TRAINING_REFRESH, LiveDisplay, TrainingView
from rollwright.cli.profile import RecentProfile
from rollwright.cli.report import LEVELS, make_report
from rollwright.cli.run import say_default_policy
from rollwright.cli.run_execution import end_code, repair_ended, say_changes, say_end, say_nothing_left
from rollwright.cli.tables import ledger_table, training_table, validation_table
from rollwright.cli.ui import page_of
from rollwright.config import RunConfig
from rollwright.engines.base import Policy
from rollwright.errors import ConfigError
from rollwright.http.server import server_url
from rollwright.rollout import Batch
from rollwright.run.build_tasks import record_fingerprints
from rollwright.run.build_training import is_under_torchrun, make_policy
from rollwright.run.checks import probe_engines
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.model_choice import load_settled
from rollwright.run.playing import RunObserver
from rollwright.run.recovery import resumed_settings
from rollwright.run.reference_scores import validation_baselines
from rollwright.run.training import TrainingRun
from rollwright.run.training_job import is_trained, train_run


class TrainingScreen(RunObserver):
    """Shows a training while it works."""

    def __init__(self, screen: Console, recent: RecentProfile, *, live: bool) -> None:
        self._screen = screen
        self._recent = recent
        self._live = live
        self.training: TrainingRun | None = None
        """Set when the training has started."""

    @asynccontextmanager
    async def watch_training(self, training: TrainingRun) -> AsyncIterator[None]:
        self.training = training
        view = TrainingView(training)
        async with LiveDisplay(
            self._screen, view.table, every=TRAINING_REFRESH, enabled=self._live, line=view.line
        ):
            yield

    def on_batch(self, mode: str, step: int, batch: Batch) -> None:
        if mode == "train":
            self._recent.add(step + 1, batch.trajectories)


def begin(
    settings: RunConfig,
    *,
    runs: Path,
    store: str | None,
    live: bool,
    report: bool,
    ui: bool = False,
    ray: str | None = None,
) -> None:
    """Train into a new folder of `runs`; `report`: write the report at the end. `ray`: where the trainer's other ranks run."""
    screen = console()
    # A wrong setting or engine is reported before anything is written.
    check_ray(ray, settings)
    settings = record_fingerprints(settings)
    settings, policy = load_settled(settings, make_policy, say=plain_lines(screen))
    if policy is not None:
        say_default_policy(settings)
        run_async(probe_engines(settings, policy))
    folder, settings = RunFolder.create(runs, settings)
    if is_under_torchrun():
        remember_run(runs, folder.path)
    with page_of(folder.path, wanted=ui):
        execute(settings, folder, screen, store=store, policy=policy, resume=False, live=live, ray=ray)
        if report:
            make_report(folder.path, LEVELS, screen)


def resume_training(
    path: Path,
    changes: Sequence[str] = (),
    *,
    store: str | None = None,
    live: bool = True,
    ui: bool = False,
    ray: str | None = None,
) -> None:
    """Train the rest of a run that stopped anywhere."""
    restore_lost_settings(path, store, console())
    reader, screen = RunReader(path), console()
    settings = resumed_settings(reader, changes)
    if is_trained(reader, settings):
        repair_ended(reader, store)
        _say_ended(path, reader, screen)
        return
    policy = make_policy(settings)
    if policy is not None:
        run_async(probe_engines(settings, policy))
    folder = RunFolder.reopen(path)
    if changes:
        folder.keep_settings(settings)
    say_repairs(folder, screen)
    with page_of(path, wanted=ui):
        execute(settings, folder, screen, store=store, policy=policy, resume=True, live=live, ray=ray)
    refuse_losses(folder)


def check_ray(address: str | None, settings: RunConfig) -> None:
    """Refuse an address that is none, and a training without ranks for Ray."""
    if address is None:
        return
    if settings.training is None or settings.training.processes == 1:
        raise ConfigError(
            "--ray: runs the trainer's other ranks, and training.processes is 1; set it to 2 or more"
        )
    try:
        from rollwright.run.ray_fleet import RayCluster
    except ImportError as error:
        raise ConfigError(f"--ray needs {error.name}; install rollwright[ray]") from error
    RayCluster(address)


def remember_run(runs: Path, folder: Path) -> None:
    """Name the folder for the processes that torchrun may start in place of these."""
    from rollwright.training.ranks.torchrun import marker

    marker(runs).write_text(f"{folder.name}\n", encoding="utf-8")


def execute(
    settings: RunConfig,
    folder: RunFolder,
    screen: Console,
    *,
    store: str | None,
    policy: Policy | None,
    resume: bool,
    live: bool,
    ray: str | None = None,
) -> None:
    """Train to the end and show the results; exits with the signal's code after an interruption."""
    recent = RecentProfile(screen, settings, folder.store_address(store))
    observer = TrainingScreen(screen, recent, live=live)
    if (served := settings.training and settings.training.serve) and served.port:
        where = server_url(served.host, served.port)
        screen.print(
            f"batches at {where}, documented at {where}/openapi.json", highlight=False, soft_wrap=True
        )
    summary = run_async(
        train_run(settings, folder, store=store, policy=policy, resume=resume, ray=ray, observer=observer)
    )
    assert observer.training is not None
    _show(observer.training, summary, screen, recent)
    if summary["interrupted"]:
        raise typer.Exit(end_code(summary))


def _say_ended(path: Path, reader: RunReader, screen: Console) -> None:
    """Print the results of a training that has ended."""
    summary = reader.summary() or {}
    if validations := summary["training"].get("validations"):
        screen.print(validation_table(validations, {}, simulated=summary.get("simulated", False)))
    screen.print(training_table(summary))
    if "ledger" in summary:
        screen.print(ledger_table(summary))
    say_nothing_left(path, screen)


def _show(run: TrainingRun, summary: dict[str, Any], screen: Console, recent: RecentProfile) -> None:
    if run.state.validations:
        beside = run_async(validation_baselines(run.config))
        screen.print(validation_table(run.state.validations, beside, simulated=run.is_simulated))
    screen.print(training_table(summary))
    if run.local is not None:
        say_changes(run.local, screen)
        screen.print(ledger_table(summary))
    recent.print()
    say_end(summary, run.folder.path, screen, "train --resume")
    say_shown_steps(RunReader(run.folder.path), screen)
    screen.print(f"results: {run.folder.path}", soft_wrap=True, highlight=False)
