"""`rollwright report`: what a training run's model learned, as a curve and a page in the run's folder."""

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rollwright.cli.condition import say_condition
from rollwright.cli.console import console
from rollwright.cli.event_loop import run_async
from rollwright.cli.tables import percent
from rollwright.config import RunConfig
from rollwright.errors import RollwrightError
from rollwright.observe.training_report import Standing, report_of, write_report
from rollwright.rollout.settings import TrainEnvManagerConfig
from rollwright.run.baselines import validation_baselines
from rollwright.run.folder import RunReader
from rollwright.run.local import LocalRun
from rollwright.run.training_assembly import in_process
from rollwright.run.training_record import is_training
from rollwright.run.training_run import MODEL

LEVELS = 512
"""For sampled play: a standard error of at most 2.2 points."""


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.", show_default=False)],
    levels: Annotated[
        int, typer.Option(min=1, help="Levels that each model plays with sampled moves.")
    ] = LEVELS,
) -> None:
    """Show what RUN's model learned: plays validation's levels with the base and the trained model, beside chance and
    perfect play, and writes curve.png and report.html, with episodes before and after, into RUN."""
    make_report(run, levels, console())


def make_report(run: Path, levels: int, screen: Console) -> None:
    reader = RunReader(run)
    if not is_training(run):
        raise RollwrightError(f"{run}: is not a training run; `rollwright show {run}` has its results")
    report_of(reader)  # says what is missing before anything is played
    standings = run_async(_standings(reader, levels))
    screen.print(_table(standings))
    for file in write_report(report_of(reader, standings), run):
        screen.print(f"written: {file}", soft_wrap=True, highlight=False)
    say_condition(reader, screen)


async def _standings(reader: RunReader, levels: int) -> list[Standing]:
    config = reader.config
    greedy = {row["step"]: row["success"] for row in reader.metrics() if row["mode"] == "val"}
    baselines = list((await validation_baselines(config)).values())
    base = trained = None
    if in_process(config):
        base = await _sampled(config, levels, None)
        if (model := reader.path / MODEL).is_dir():
            trained = await _sampled(config, levels, model)
    return [
        Standing("random player", _mean([each.random for each in baselines]), None),
        Standing("base model", base, greedy.get(0)),
        Standing("trained model", trained, greedy[max(greedy)]),
        Standing("oracle", None, _mean([each.oracle for each in baselines])),
    ]


async def _sampled(config: RunConfig, levels: int, model: Path | None) -> float | None:
    """Share of levels like validation's that a model solves when it samples as in training; `None` for the model: the
    base model."""
    assert config.val_env_manager is not None
    tags = config.val_env_manager.tags
    play = TrainEnvManagerConfig(num_env_groups=max(levels, len(tags)), tags=tags)
    changes = {"train_env_manager": play, "rollout_batch_size": play.num_env_groups, "training": None}
    if model is not None:
        changes["policy"] = config.policy.model_copy(update={"model": str(model)})
    async with LocalRun(config.model_copy(update=changes)) as run:
        batch = await run.get_batch()
    return _mean([None if each.success is None else float(each.success) for each in batch.trajectories])


def _mean(values: list[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return sum(known) / len(known) if known else None


def _table(standings: list[Standing]) -> Table:
    table = Table(title="levels solved", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for figure in ("sampled", "greedy"):
        table.add_column(figure, justify="right")
    for each in standings:
        table.add_row(each.name, percent(each.sampled), percent(each.greedy))
    return table
