"""`rollwright show`: a run at a glance, or one trajectory turn by turn."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollwright.cli.console import console
from rollwright.cli.tables import ledger_table, result_table
from rollwright.errors import RollwrightError
from rollwright.run.folder import RunReader
from rollwright.trajectory import Trajectory, Turn

LISTED = 20
"""Trajectories listed when none is asked for."""


def show(
    run: Annotated[Path, typer.Argument(help="Run folder.", show_default=False)],
    rollout: Annotated[
        str | None, typer.Argument(help="Rollout id, or the end of one, such as g3-m0.", show_default=False)
    ] = None,
    prompts: Annotated[bool, typer.Option(help="Show the opening messages too.")] = False,
) -> None:
    """Show RUN's results, or ROLLOUT's trajectory with the rewards of each turn."""
    reader = RunReader(run)
    screen = console()
    if rollout is None:
        _overview(reader, screen)
    else:
        screen.print(render(find(reader, rollout), prompts=prompts))
    if reader.cut_off:
        screen.print("[yellow]the last record of the trajectory log is incomplete and was left out[/]")


def find(reader: RunReader, wanted: str) -> Trajectory:
    """The trajectory with this rollout id, or the only one whose id ends so."""
    matches = [
        each
        for each in reader.trajectories()
        if each.rollout_id == wanted or each.rollout_id.endswith(("." + wanted, "-" + wanted))
    ]
    exact = [each for each in matches if each.rollout_id == wanted]
    if len(exact or matches) == 1:
        return (exact or matches)[0]
    if matches:
        some = ", ".join(each.rollout_id for each in matches[:5])
        raise RollwrightError(f"{wanted}: {len(matches)} rollouts of {reader.path} end so: {some} …")
    failed = [row for row in reader.failures() if row["rollout_id"].endswith(wanted)]
    if failed:
        raise RollwrightError(
            f"{failed[0]['rollout_id']}: failed, so it has no trajectory: {failed[0]['reason']}"
        )
    raise RollwrightError(
        f"{wanted}: {reader.path} has no such rollout; `rollwright show {reader.path}` lists some"
    )


def render(trajectory: Trajectory, *, prompts: bool = False) -> RenderableType:
    parts: list[RenderableType] = [_headline(trajectory)]
    if prompts:
        parts += [
            Panel(Text(message.content), title=message.role, title_align="left", border_style="dim")
            for message in trajectory.opening
        ]
    parts.append(Panel(Text(trajectory.observation), title="start", title_align="left", expand=False))
    parts += [_turn(turn) for turn in trajectory.turns]
    return Group(*parts)


def _headline(trajectory: Trajectory) -> Text:
    solved = {True: "solved", False: "not solved", None: "not judged"}[trajectory.success]
    text = Text(trajectory.rollout_id, style="bold")
    text.append(
        f"  {trajectory.tag}, level {trajectory.seed}: {solved}, reward {trajectory.reward:g}"
        f"{f', format penalty {trajectory.penalty:g}' if trajectory.penalty else ''}"
        f", {len(trajectory.turns)} turns, {trajectory.sampled_tokens} tokens, ended by {trajectory.stop}",
        style="not bold",
    )
    if (why := trajectory.not_trainable) is not None:
        text.append(f"\nnot trainable: {why}", style="yellow")
    return text


def _turn(turn: Turn) -> RenderableType:
    parts: list[RenderableType] = [Text(turn.text, style="cyan")]
    title = f"turn {turn.id + 1} · {turn.completion_tokens} tokens"
    if turn.versions:
        first, last = turn.versions[0].version, turn.versions[-1].version
        title += f" · version {first}" + (f"–{last}" if last != first else "")
    if turn.outcome is not None:
        outcome = turn.outcome
        parts.append(Text(outcome.observation))
        title += f" · {outcome.action or 'no action'} · reward {outcome.reward:+g}"
        title += f" · format penalty {outcome.penalty:+g}" if outcome.penalty else ""
    return Panel(Group(*parts), title=title, title_align="left", expand=False)


def _overview(reader: RunReader, console: Console) -> None:
    summary = reader.summary()
    if summary is None:
        console.print(f"{reader.path}: the run has not ended, or was killed; what is written so far:")
    else:
        console.print(result_table(summary))
        console.print(ledger_table(summary))
    console.print(_list(reader.trajectories()))
    failures = reader.failures()
    for row in failures[:LISTED]:
        console.print(f"[red]failed[/] {row['rollout_id']}: {row['reason']}", highlight=False)


def _list(trajectories: Iterable[Trajectory]) -> Table:
    table = Table(title="trajectories", title_justify="left")
    for name in ("rollout", "environment", "solved", "ended by"):
        table.add_column(name)
    for name in ("turns", "reward", "tokens"):
        table.add_column(name, justify="right")
    left = 0
    for number, each in enumerate(trajectories):
        if number >= LISTED:
            left += 1
            continue
        solved = {True: "[green]yes[/]", False: "no", None: "–"}[each.success]
        figures = (str(len(each.turns)), f"{each.reward:g}", str(each.sampled_tokens))
        table.add_row(each.rollout_id, each.tag, solved, str(each.stop), *figures)
    if left:
        table.caption = f"and {left:,} more"
    return table
