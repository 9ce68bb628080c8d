"""`rollwright rescore`: computes a run's rewards again, and shows old and new ones side by side."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rollwright.cli.condition import say_condition
from rollwright.cli.console import RunArgument, console
from rollwright.cli.event_loop import run_async
from rollwright.run.folder import CONFIG, RunReader

if TYPE_CHECKING:
    from rollwright.run.rescoring import Rescored, Rescorer

TOTAL = "reward"


@dataclass
class _Means:
    """One reward's values before and after."""

    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    changed: int = 0


def rescore(
    run: RunArgument,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Other rewards: custom_envs.TAG.rewards=[exact_match] …", show_default=False),
    ] = None,
) -> None:
    """Compute RUN's rewards again from its stored trajectories, without an engine. Old and new rewards are written to
    rescored.jsonl in RUN; the trajectories stay as they are."""
    from rollwright.config import build
    from rollwright.run.rescoring import RESCORED, Rescorer

    reader = RunReader(run)
    config = reader.config
    if overrides:
        config = build(config.model_dump(mode="json"), overrides, source=str(run / CONFIG))
    failed = run_async(_rescore(Rescorer(reader, config), console()))
    console().print(f"written: {run / RESCORED}", soft_wrap=True, highlight=False)
    say_condition(reader, console())
    if failed:
        raise typer.Exit(1)


async def _rescore(rescorer: "Rescorer", screen: Console) -> int:
    """Shows a table; returns how many trajectories could not be judged."""
    means: dict[tuple[str, str, str], _Means] = defaultdict(_Means)
    failed: list[Rescored] = []
    try:
        async for each in rescorer.rescore():
            if each.after is None:
                failed.append(each)
            else:
                _add(means, each, each.after)
    finally:
        await rescorer.close()
    screen.print(_table(means))
    if failed:
        first = failed[0]
        screen.print(
            f"[red]{len(failed)} could not be judged[/], first {first.rollout_id}: {first.error}",
            soft_wrap=True,
            highlight=False,
        )
    return len(failed)


def _add(means: dict[tuple[str, str, str], _Means], each: "Rescored", after: float) -> None:
    before = {TOTAL: each.before, **each.components_before}
    now = {TOTAL: after, **(each.components_after or {})}
    for name in {**before, **now}:
        row = means[each.mode, each.tag, name]
        row.before += [before[name]] if name in before else []
        row.after += [now[name]] if name in now else []
        row.changed += before.get(name) != now.get(name)


def _table(means: dict[tuple[str, str, str], _Means]) -> Table:
    table = Table(title="rewards, before and now", title_justify="left", box=box.SIMPLE)
    for name in ("mode", "environment", "reward"):
        table.add_column(name)
    for name in ("before", "now", "changed"):
        table.add_column(name, justify="right")
    for (mode, tag, name), row in sorted(means.items()):
        table.add_row(mode, tag, name, _mean(row.before), _mean(row.after), f"{row.changed:,}")
    return table


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else "–"
