"""`rollwright train`: trains a model on the episodes that it plays, and leaves everything in one run folder."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rollwright.cli.condition import refuse_losses, restore_lost_settings, say_repairs
from rollwright.cli.console import console, plain_lines, warn_of_password
from rollwright.cli.event_loop import absorb_cancellation, run_async
from rollwright.cli.profile import RecentProfile
from rollwright.cli.redrawn import Redrawn
from rollwright.cli.report import LEVELS, make_report
from rollwright.cli.run import repair_ended, say_changes, settings_to_resume, summary_of, unless_full
from rollwright.cli.tables import ledger_table, say_shown_steps
from rollwright.cli.training_view import REFRESH_SECONDS, TrainingView, training_table, validation_table
from rollwright.config import RunConfig, build, load
from rollwright.errors import ConfigError
from rollwright.observe.statistics import batch_row
from rollwright.rollout import Batch
from rollwright.run.baselines import Baseline, validation_baselines
from rollwright.run.engine_check import ask_engine_first
from rollwright.run.folder import CONFIG, RunFolder, RunReader, read_settings
from rollwright.run.model_choice import load_settled
from rollwright.run.training_assembly import make_policy
from rollwright.run.training_record import training_rows
from rollwright.run.training_run import MODEL, Row, TrainingRun
from rollwright.signals import INTERRUPTS


def train(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file with a `training` part.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings that win over the file: key.path=value …", show_default=False),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            help="Train on the batches that this run has recorded, without an engine.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with this run folder.", show_default=False)
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder that holds the run folders.")] = Path("runs"),
    store: Annotated[
        str | None,
        typer.Option(help="Where rollouts are kept. Default: in the run folder.", callback=warn_of_password),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="At the end, do what `rollwright report` does.")
    ] = False,
    live: Annotated[bool, typer.Option(help="Show what happens while it happens.")] = True,
) -> None:
    """Train as CONFIG says. Ctrl-C ends cleanly, and a crash costs nothing but time: `--resume RUN` goes on."""
    changes = list(overrides or [])
    if config is not None and "=" in str(config) and not config.is_file():
        changes.insert(0, str(config))  # without a file, the first setting stands in its place
        config = None
    if resume is not None:
        if config is not None or from_run is not None:
            raise ConfigError("--resume: a run goes on with its own settings; give nothing else to train on")
        go_on(resume, changes, store=store, live=live)
        return
    settings = _settings(config, changes, from_run)
    # what is wrong shows before anything is written
    settings, policy = load_settled(settings, make_policy, say=plain_lines(console()))
    if policy is not None:
        run_async(ask_engine_first(settings, policy))
    folder, settings = RunFolder.create(runs, settings)
    screen = console()
    address = folder.store_address(store)
    recent = RecentProfile(screen, settings, address)
    run = TrainingRun(settings, folder, policy=policy, store=address, row=_profiled(recent))
    _train(run, screen, recent, live=live)
    if report:
        make_report(folder.path, LEVELS, screen)


def go_on(path: Path, changes: Sequence[str] = (), *, store: str | None = None, live: bool = True) -> None:
    """The rest of a training run that stopped anywhere."""
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
    """What a training run that has ended came to."""
    summary = reader.summary() or {}
    if validations := summary["training"].get("validations"):
        screen.print(validation_table(validations, {}))
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


def _settings(config: Path | None, changes: list[str], from_run: Path | None) -> RunConfig:
    if from_run is None:
        if config is None:
            raise ConfigError("CONFIG: is needed, unless --from-run or --resume names a run")
        return load(config, changes)
    changes = [*changes, f"training.from_run={from_run}"]
    if config is not None:
        return load(config, changes)
    RunReader(from_run)  # says in one line when this is no run folder
    file = from_run / CONFIG
    content = read_settings(from_run)
    return build({**content, "training": content.get("training") or {}}, changes, source=str(file))


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
    summary: dict[str, Any] = {"name": run.config.name}
    try:
        view = TrainingView(run)
        async with Redrawn(screen, view.table, every=REFRESH_SECONDS, enabled=live, line=view.line):
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
        screen.print(validation_table(run.validations, beside))
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
