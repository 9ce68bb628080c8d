"""`rollwright show`: an overview of a run, one group, or one trajectory turn by turn, from a run folder or a store's file.

The overview loads only what it reads: filters, advantages and tokenizers come with `show_rollout` and `trajectory_view`,
once a group or a trajectory is asked for.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollwright.cli.condition import say_condition
from rollwright.cli.console import complete_run, console
from rollwright.cli.tables import ledger_table, result_table, title_of, training_table
from rollwright.errors import RollwrightError
from rollwright.run.folder import RunReader
from rollwright.trajectory import Trajectory, leaves

if TYPE_CHECKING:
    from rollwright.config import RunConfig
    from rollwright.store.api import Store
    from rollwright.store.records import Rollout

LISTED = 20
"""Trajectories in an overview: of a run the first, of a store the newest."""


def show(
    run: Annotated[
        Path,
        typer.Argument(
            help="Run folder, or the file of a store.", show_default=False, autocompletion=complete_run
        ),
    ],
    rollout: Annotated[
        str | None,
        typer.Argument(
            help="Rollout id, or the end of one, such as g3-m0; or a group's, such as g3.", show_default=False
        ),
    ] = None,
    prompts: Annotated[
        bool, typer.Option(help="Show what was asked too: the opening messages, or each agent's own prompt.")
    ] = False,
    turns: Annotated[bool, typer.Option(help="Show a tree's turns one by one too.")] = False,
) -> None:
    """Show RUN's results, a group, or ROLLOUT's trajectory: the rewards of each turn, a tree as a tree."""
    screen = console()
    if run.is_file():
        _show_stored(run, rollout, screen, prompts=prompts)
        return
    if not run.exists():
        raise RollwrightError(f"{run}: there is no such file or folder; runs are usually in runs/NAME")
    reader = RunReader(run)
    if rollout is None:
        _show_overview(reader, screen)
    else:
        from rollwright.cli.show_rollout import show_group, show_trajectory

        if group := find_group(reader, rollout):
            title = title_of(f"group {group[0].group_id}", simulated=reader.simulated)
            screen.print(_list(group, title=title))
            show_group(reader, group, screen)
        else:
            show_trajectory(reader, find(reader, rollout), screen, prompts=prompts, turns=turns)
    say_condition(reader, screen)


def find(reader: RunReader, wanted: str) -> Trajectory:
    """The trajectory with this rollout id, or the only one whose id ends with it."""
    matches = [each for each in reader.trajectories() if _matches(each.rollout_id, wanted)]
    exact = [each for each in matches if each.rollout_id == wanted]
    if len(exact or matches) == 1:
        return (exact or matches)[0]
    if matches:
        some = ", ".join(each.rollout_id for each in matches[:5])
        raise RollwrightError(f"{wanted}: {len(matches)} rollouts of {reader.path} end with it: {some} …")
    failed = [row for row in reader.failures() if row["rollout_id"].endswith(wanted)]
    if failed:
        raise RollwrightError(
            f"{failed[0]['rollout_id']}: failed, so it has no trajectory: {failed[0]['reason']}"
        )
    shown = reader.shown_steps()
    raise RollwrightError(
        f"{wanted}: {reader.path} has no such rollout; `rollwright show {reader.path}` lists some"
        + (f" (of {shown})" if shown else "")
    )


def find_group(reader: RunReader, wanted: str) -> list[Trajectory]:
    """Trajectories of the group with this id, or of the only one whose id ends with it; empty if there is none."""
    matches: dict[str, list[Trajectory]] = {}
    for each in reader.trajectories():
        if _matches(each.group_id, wanted):
            matches.setdefault(each.group_id, []).append(each)
    found = {wanted: matches[wanted]} if wanted in matches else matches
    if len(found) > 1:
        raise RollwrightError(
            f"{wanted}: {len(found)} groups of {reader.path} end with it: {', '.join(found)}"
        )
    return next(iter(found.values()), [])


def _matches(found: str, wanted: str) -> bool:
    return found == wanted or found.endswith(("." + wanted, "-" + wanted))


def _show_overview(reader: RunReader, console: Console) -> None:
    summary = reader.summary()
    if summary is None:
        console.print(f"{reader.path}: the run has not ended, or was killed; its results so far:")
    else:  # a training on recorded batches has no results of its own
        if "training" in summary:
            console.print(training_table(summary))
        if "results" in summary:
            console.print(result_table(summary))
            console.print(ledger_table(summary))
    console.print(_list(reader.trajectories(), title=title_of("trajectories", simulated=reader.simulated)))
    failures = reader.failures()
    for row in failures[:LISTED]:
        line = Text.assemble(("failed", "red"), f" {row['rollout_id']}: {row['reason']}")
        console.print(line, soft_wrap=True)
    if len(failures) > LISTED:
        console.print(f"and {len(failures) - LISTED:,} more failed; all are in failures.jsonl")


def _list(trajectories: Iterable[Trajectory], *, title: Text) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("rollout", "environment", "solved", "ended by"):
        table.add_column(name)
    for name in ("turns", "leaves", "reward", "tokens"):
        table.add_column(name, justify="right")
    left = 0
    for number, each in enumerate(trajectories):
        if number >= LISTED:
            left += 1
            continue
        share = each.success_share
        solved = "–" if share is None else "no" if share == 0 else f"[green]{100 * share:.0f} %[/]"
        if each.success:
            solved = "[green]yes[/]"
        figures = (
            str(len(each.turns)),
            str(len(leaves(each.turns))),
            f"{each.reward:g}",
            str(each.sampled_tokens),
        )
        table.add_row(each.rollout_id, each.tag, solved, str(each.stop), *figures)
    if left:
        table.caption = f"and {left:,} more"
    return table


def _show_stored(file: Path, rollout: str | None, screen: Console, *, prompts: bool) -> None:
    stored = _read_file(file, rollout, screen)
    simulated = stored.config is not None and stored.config.plays_simulated
    if rollout is None:
        screen.print(_list(stored.trajectories, title=title_of("trajectories", simulated=simulated)))
        return
    from rollwright.cli.trajectory_view import render
    from rollwright.observe.prompt_text import PromptReader

    if prompts and stored.config is None:
        screen.print("prompts: the store has no settings of this rollout, so they cannot be read")
    asked = PromptReader(stored.config) if prompts and stored.config is not None else None
    screen.print(render(stored.trajectories[0], asked, simulated=simulated))


@dataclass(frozen=True)
class _Stored:
    """Trajectories of a store's file without a run folder, such as a gateway's."""

    trajectories: list[Trajectory]
    config: "RunConfig | None"
    """Settings of the first trajectory's run; `None` if the store has none."""


def _read_file(file: Path, rollout: str | None, screen: Console) -> _Stored:
    """Read the rollout with this id, or the only one whose id contains it; without an id, the newest successful ones."""

    from rollwright.cli.event_loop import run_async
    from rollwright.store.opening import open_store

    async def read() -> _Stored:
        store = await open_store(str(file), must_exist=True)
        try:
            return await _read_rollouts(store, file, rollout, screen)
        finally:
            await store.close()

    return run_async(read())


async def _read_rollouts(store: "Store", file: Path, rollout: str | None, screen: Console) -> _Stored:
    page = await store.query_rollouts(rollout_id_contains=rollout, sort_order="desc", limit=LISTED)
    chosen = [each for each in page.items if each.rollout_id == rollout] or list(page.items)
    if rollout is not None and len(chosen) != 1:
        some = ", ".join(each.rollout_id for each in chosen[:5]) or f"`rollwright show {file}` lists some"
        raise RollwrightError(f"{rollout}: {page.total} rollouts of {file} match: {some}")
    encoded = await store.get_trajectories([each.rollout_id for each in chosen])
    if rollout is not None and not encoded:
        last = await store.query_attempts(chosen[0].rollout_id, sort_order="desc", limit=1)
        why = next((each.reason for each in last.items), None)
        raise RollwrightError(
            f"{chosen[0].rollout_id}: is {chosen[0].status} and has no trajectory"
            + (f": {why}" if why else "")
        )
    if left := len(chosen) - len(encoded):
        screen.print(f"{left} of the newest {len(chosen)} rollouts have no trajectory", highlight=False)
    config = await _stored_settings(store, chosen[0]) if chosen else None
    return _Stored([Trajectory.from_bytes(each) for each in encoded.values()], config)


async def _stored_settings(store: "Store", rollout: "Rollout") -> "RunConfig | None":
    from rollwright.config import build
    from rollwright.run.worker_settings import CONFIG_KEY

    found = await store.get_resources_by_id(rollout.resources_id) if rollout.resources_id else None
    settings = None if found is None else found.resources.get(CONFIG_KEY)
    return None if settings is None else build(settings, source=f"settings of {rollout.rollout_id}")
