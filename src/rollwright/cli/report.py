"""`rollwright plot`, `report` and `export`: a run as plots, as a page about what its model learned, and as a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rollwright.cli.condition import say_condition
from rollwright.cli.console import RunArgument, complete_run, console
from rollwright.cli.tables import percent, title_of
from rollwright.errors import RollwrightError
from rollwright.run.folder import RunReader

if TYPE_CHECKING:
    from rollwright.config import RunConfig
    from rollwright.observe.solved_boards import SolvedBoards
    from rollwright.observe.training_report import Standing

PICTURES = ("png", "svg")
TABLES = ("parquet",)

LEVELS = 512
"""Levels of sampled play: a standard error of at most 2.2 points."""


def plot(
    run: RunArgument,
    to: Annotated[str, typer.Option(help="Format: png or svg.")] = "png",
    output: Annotated[
        Path | None,
        typer.Option(help="Folder. Default: `plots` in the run folder.", show_default=False),
    ] = None,
) -> None:
    """Plot RUN: reward, its components, episode lengths, catches of filters, shapes of trees, tokens per leaf."""
    if to not in PICTURES:
        raise RollwrightError(f"--to {to}: unknown format; known: {', '.join(PICTURES)}")
    from rollwright.observe.plots import draw, picture_of

    reader = RunReader(run)
    files = draw(picture_of(reader), output or run / "plots", to)
    if not files:
        raise RollwrightError(f"{run}: has no batch yet, so there is nothing to plot")
    for file in files:
        console().print(f"written: {file}", soft_wrap=True, highlight=False)
    say_condition(reader, console())


def export(
    run: RunArgument,
    to: Annotated[str, typer.Option(help="Format: parquet.")] = "parquet",
    output: Annotated[
        Path | None, typer.Option(help="File. Default: in the run folder.", show_default=False)
    ] = None,
) -> None:
    """Write RUN's trajectories to a file: one row for each turn, with the exact token ids."""
    if to not in TABLES:
        raise RollwrightError(f"--to {to}: unknown format; known: {', '.join(TABLES)}")
    from rollwright.run.export import write_parquet

    reader = RunReader(run)
    file = output or run / f"trajectories.{to}"
    rows = write_parquet(reader.trajectories(), file, simulated=reader.simulated)
    console().print(f"{rows:,} turns written to {file}", highlight=False)
    say_condition(reader, console())


def report(
    run: Annotated[
        Path,
        typer.Argument(help="Folder of a training run.", show_default=False, autocompletion=complete_run),
    ],
    levels: Annotated[
        int, typer.Option(min=1, help="Levels that each model plays with sampled moves.")
    ] = LEVELS,
) -> None:
    """Show what RUN's model learned: plays validation's levels with the base and the trained model, beside chance and
    perfect play, and writes curve.png and report.html, with episodes before and after, into RUN."""
    make_report(run, levels, console())


def make_report(run: Path, levels: int, screen: Console) -> None:
    """Play the models for comparison, print their results, and write the curve and the page."""
    from rollwright.cli.event_loop import run_async
    from rollwright.observe.training_report import report_of, write_report
    from rollwright.run.training_record import is_training

    reader = RunReader(run)
    if not is_training(run):
        raise RollwrightError(f"{run}: is not a training run; `rollwright show {run}` has its results")
    report_of(reader)  # raises an error for missing parts before anything is played
    standings = run_async(_standings(reader, levels))
    screen.print(_table(standings, simulated=reader.simulated))
    found = report_of(reader, standings)
    if found.solved:
        screen.print(_boards_table(found.solved))
    for file in write_report(found, run):
        screen.print(f"written: {file}", soft_wrap=True, highlight=False)
    say_condition(reader, screen)


async def _standings(reader: RunReader, levels: int) -> "list[Standing]":
    from rollwright.observe.training_report import Standing
    from rollwright.run.build_training import in_process
    from rollwright.run.reference_scores import validation_baselines
    from rollwright.run.training import MODEL

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


async def _sampled(config: "RunConfig", levels: int, model: Path | None) -> float | None:
    """Share of solved levels, of validation's kind, with the sampling of training; `model=None`: the base model."""
    from rollwright.rollout.settings import TrainEnvManagerConfig
    from rollwright.run.run import Run

    assert config.val_env_manager is not None
    tags = config.val_env_manager.tags
    play = TrainEnvManagerConfig(num_env_groups=max(levels, len(tags)), tags=tags)
    changes = {
        "train_env_manager": play,
        "rollout_batch_size": play.num_env_groups,
        "async_generation_ratio": 0.0,  # or the batch would be of the shortest episodes, which end first
        "training": None,
    }
    if model is not None:
        changes["policy"] = config.policy.model_copy(update={"model": str(model)})
    async with Run(config.model_copy(update=changes)) as run:
        batch = await run.get_batch()
    return _mean([None if each.success is None else float(each.success) for each in batch.trajectories])


def _mean(values: list[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return sum(known) / len(known) if known else None


def _boards_table(solved: "Sequence[SolvedBoards]") -> Table:
    from rollwright.observe.training_report import boards_solved

    table = Table(title="distinct boards solved, greedy", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for figure in ("levels", "boards", "before", "after", "95 % interval"):
        table.add_column(figure, justify="right")
    for each in solved:
        table.add_row(each.tag, str(each.levels), str(each.boards), *boards_solved(each))
    return table


def _table(standings: "list[Standing]", *, simulated: bool) -> Table:
    table = Table(
        title=title_of("levels solved", simulated=simulated), title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("")
    for figure in ("sampled", "greedy"):
        table.add_column(figure, justify="right")
    for each in standings:
        table.add_row(each.name, percent(each.sampled), percent(each.greedy))
    return table
