"""`rollwright show`: a run at a glance, one group, or one trajectory turn by turn.

The log of a run holds play as it was; what filters made of it is worked out again here, with the run's own filters.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollwright.cli.condition import say_condition
from rollwright.cli.console import console
from rollwright.cli.prompt_view import Prompts
from rollwright.cli.show_stored import read_stored
from rollwright.cli.tables import ledger_table, result_table
from rollwright.cli.training_view import training_table
from rollwright.cli.tree_view import leaf_count, tree_view
from rollwright.errors import ConfigError, RollwrightError
from rollwright.observe.trees import PREFIX as TREE
from rollwright.rollout.filters import (
    Catches,
    Filter,
    GroupTest,
    MemberTest,
    build_filters,
    judge,
    judge_group,
)
from rollwright.run.folder import RunReader
from rollwright.run.training_assembly import make_training_advantage
from rollwright.training.advantages import Tree as TreeCredit
from rollwright.trajectory import Trajectory, Turn

DEFAULT_AGENT = "agent"
"""Of a turn whose agent has no name of its own."""

LISTED = 20
"""Trajectories listed when none is asked for."""


def show(
    run: Annotated[Path, typer.Argument(help="Run folder, or the file of a store.", show_default=False)],
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
    """Show RUN's results, a group, or ROLLOUT's trajectory with the rewards of each turn; a tree as a tree."""
    screen = console()
    if run.is_file():
        stored = read_stored(run, rollout, screen)
        if rollout is None:
            screen.print(_list(stored.trajectories))
            return
        if prompts and stored.config is None:
            screen.print("prompts: the store has no settings of this rollout, so they cannot be read")
        asked = Prompts(stored.config) if prompts and stored.config is not None else None
        screen.print(render(stored.trajectories[0], asked))
        return
    reader = RunReader(run)
    if rollout is None:
        _overview(reader, screen)
    elif group := find_group(reader, rollout):
        screen.print(_list(group, title=f"group {group[0].group_id}"))
        screen.print(_caught(_filters(reader, group[0], screen), group))
    else:
        _trajectory(reader, find(reader, rollout), screen, prompts=prompts, turns=turns)
    say_condition(reader, screen)


def find(reader: RunReader, wanted: str) -> Trajectory:
    """The trajectory with this rollout id, or the only one whose id ends so."""
    matches = [each for each in reader.trajectories() if _is(each.rollout_id, wanted)]
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
    shown = reader.shown_steps()
    raise RollwrightError(
        f"{wanted}: {reader.path} has no such rollout; `rollwright show {reader.path}` lists some"
        + (f" (of {shown})" if shown else "")
    )


def find_group(reader: RunReader, wanted: str) -> list[Trajectory]:
    """The trajectories of the group with this id, or of the only one whose id ends so; empty: it is no group's."""
    matches: dict[str, list[Trajectory]] = {}
    for each in reader.trajectories():
        if _is(each.group_id, wanted):
            matches.setdefault(each.group_id, []).append(each)
    found = {wanted: matches[wanted]} if wanted in matches else matches
    if len(found) > 1:
        raise RollwrightError(f"{wanted}: {len(found)} groups of {reader.path} end so: {', '.join(found)}")
    return next(iter(found.values()), [])


def _is(found: str, wanted: str) -> bool:
    return found == wanted or found.endswith(("." + wanted, "-" + wanted))


def _filters(reader: RunReader, trajectory: Trajectory, screen: Console) -> tuple[Filter, ...]:
    """Those that the trajectory went through: only training has any."""
    config = reader.config
    if config.train_env_manager is None or not trajectory.group_id.startswith(f"{config.name}.train-"):
        return ()
    try:
        return build_filters(config.train_env_manager)
    except ConfigError as error:  # one's own filter, which is not to be found from here
        screen.print(f"[yellow]shown without filters:[/] {error}", highlight=False)
        return ()


class _InGroup(NamedTuple):
    """What the filters left of a group."""

    judged: list[Trajectory]
    """Its members without those that were replaced, as the filters of turns and trajectories left them."""
    members: list[Trajectory]
    """The same, as all filters left them."""
    catches: Catches
    replaced: dict[str, str]
    """By rollout: the filter."""
    dropped: str | None
    """The filter that leaves the whole group out."""


def _judged(filters: Sequence[Filter], group: Sequence[Trajectory]) -> _InGroup:
    """In the order of its members, as it was judged while the run played; the log has them as they ended."""
    catches = Catches()
    in_order = sorted(group, key=lambda each: (len(each.rollout_id), each.rollout_id))  # m2 before m10
    judged = [judge(filters, each, catches) for each in in_order]
    replaced = {each.trajectory.rollout_id: each.dropped for each in judged if each.dropped is not None}
    kept = [each.trajectory for each in judged if each.dropped is None]
    members, dropped = judge_group(filters, kept, catches)
    return _InGroup(kept, members, catches, replaced, dropped)


def _caught(filters: Sequence[Filter], group: Sequence[Trajectory]) -> RenderableType:
    in_group = _judged(filters, group)
    lines = [
        f"{rollout}: replaced, because of filter {caught_by}"
        for rollout, caught_by in in_group.replaced.items()
    ]
    lines += [
        f"filter {name}: {catch.count}, for example {catch.example}"
        for name, catch in in_group.catches.by_filter.items()
    ]
    if in_group.dropped is not None:
        lines.append(_left_out(in_group.dropped))
    return Text("\n".join(lines), style="yellow")


def _left_out(dropped: str) -> str:
    return f"the whole group is left out, because of filter {dropped}"


def _trajectory(
    reader: RunReader, trajectory: Trajectory, screen: Console, *, prompts: bool, turns: bool
) -> None:
    filters = _filters(reader, trajectory, screen)
    group = _judged(filters, [each for each in reader.trajectories() if each.group_id == trajectory.group_id])
    catches = Catches()
    alone = judge(filters, trajectory, catches).trajectory
    left = next((each for each in group.members if each.rollout_id == trajectory.rollout_id), alone)
    is_tree = leaf_count(trajectory) > 1
    asked = Prompts(reader.config) if prompts else None
    screen.print(render(left, asked, turns=turns or not is_tree))
    if is_tree:
        name, advantages = _advantages(reader, left, group.members)
        screen.print(tree_view(left, advantages))
        screen.print(f"advantages: {name}, among the rollouts of {left.group_id}", highlight=False)
    for caught, catch in catches.by_filter.items():
        times = "once" if catch.count == 1 else f"{catch.count} times"
        screen.print(f"[yellow]caught by filter {caught}[/], {times}", highlight=False)
    for caught in _caught_beside(filters, group.judged, trajectory.rollout_id):
        screen.print(f"[yellow]caught by filter {caught}[/], beside the others of its group", highlight=False)
    if (replaced := group.replaced.get(trajectory.rollout_id)) is not None:
        screen.print(f"[yellow]replaced by another rollout, because of filter {replaced}[/]", highlight=False)
    if group.dropped is not None:
        screen.print(f"[yellow]{_left_out(group.dropped)}[/]", highlight=False)


def _caught_beside(filters: Sequence[Filter], members: Sequence[Trajectory], rollout_id: str) -> list[str]:
    """The filters that caught this member among the others, or all of them together."""
    places = [place for place, each in enumerate(members) if each.rollout_id == rollout_id]
    return [
        each.name
        for each in filters
        if (isinstance(each.test, MemberTest) and set(places) & set(each.test.caught_members(members)))
        or (isinstance(each.test, GroupTest) and places and each.test.catches_group(members))
    ]


def _advantages(
    reader: RunReader, trajectory: Trajectory, members: Sequence[Trajectory]
) -> tuple[str, list[float]]:
    """As the run's training works them out, or by `tree` where it does not train; and the name of that."""
    others = [each for each in members if each.rollout_id != trajectory.rollout_id]
    training = reader.config.training
    name, advantage = (
        ("tree", TreeCredit())
        if training is None
        else (training.advantage.name, make_training_advantage(training))
    )
    return name, advantage([[trajectory, *others]])[0][0]


def render(trajectory: Trajectory, prompts: Prompts | None = None, *, turns: bool = True) -> RenderableType:
    """`prompts`: to show what was asked. The opening messages are shown where one agent was asked in one conversation;
    elsewhere every turn that starts a conversation is shown with its own prompt."""
    parts: list[RenderableType] = [_headline(trajectory)]
    alone = sum(turn.extends is None for turn in trajectory.turns) <= 1 and not _is_team(trajectory)
    if prompts is not None and (alone or not any(turn.prompt_ids for turn in trajectory.turns)):
        parts += [
            Panel(Text(message.content), title=message.role, title_align="left", border_style="dim")
            for message in trajectory.opening
        ]
    parts.append(Panel(Text(trajectory.observation), title="start", title_align="left", expand=False))
    for turn in trajectory.turns if turns else ():
        if prompts is not None and not alone:
            title = f"prompt of turn {turn.id + 1}{_by(turn)} · {turn.prompt_tokens} tokens"
            asked = Text(prompts.text(turn))
            parts.append(Panel(asked, title=title, title_align="left", expand=False, border_style="dim"))
        parts.append(_turn(turn))
    if counted := _counted(trajectory):
        parts.append(counted)
    return Group(*parts)


def _is_team(trajectory: Trajectory) -> bool:
    return len({turn.agent for turn in trajectory.turns}) > 1


def _by(turn: Turn) -> str:
    """Which agent's it is, unless there is only the one without a name."""
    return "" if turn.agent == DEFAULT_AGENT else f" · {turn.agent}"


def _counted(trajectory: Trajectory) -> Text | None:
    """The episode's own counters; those of a tree are told with the tree."""
    counters = {name: value for name, value in trajectory.metrics.items() if not name.startswith(TREE)}
    if not counters:
        return None
    return Text("counted: " + ", ".join(f"{name} {value:g}" for name, value in sorted(counters.items())))


def _headline(trajectory: Trajectory) -> Text:
    solved = {True: "solved", False: "not solved", None: "not judged"}[trajectory.success]
    if trajectory.success is None and (share := trajectory.success_share) is not None:
        solved = f"{100 * share:.0f} % solved"
    text = Text(trajectory.rollout_id, style="bold")
    text.append(
        f"  {trajectory.tag}, level {trajectory.seed}: {solved}, reward {trajectory.reward:g}"
        f"{f', format penalty {trajectory.penalty:g}' if trajectory.penalty else ''}"
        f", {len(trajectory.turns)} turns, {trajectory.sampled_tokens} tokens, ended by {trajectory.stop}",
        style="not bold",
    )
    if trajectory.sampling is not None:
        text.append(f"\nsampled at {trajectory.sampling.described()}", style="not bold")
    if (why := trajectory.not_trainable) is not None:
        text.append(f"\nnot trainable: {why}", style="yellow")
    elif untrained := Counter(trajectory.never_trained()):
        parts = (f"{count} turn{'s' * (count > 1)}, {reason}" for reason, count in untrained.items())
        text.append(f"\nout of the loss: {'; '.join(parts)}", style="yellow")
    if of_gateway := [
        f"{name} {value:g}" for name, value in trajectory.metrics.items() if name.startswith("gateway_")
    ]:
        text.append(f"\n{', '.join(of_gateway)}", style="not bold")
    if trajectory.filtered is not None:
        beside = "" if trajectory.in_baseline else ", and out of the baseline"
        text.append(f"\nout of the loss{beside}: {trajectory.filtered}", style="yellow")
    return text


def _turn(turn: Turn) -> RenderableType:
    parts: list[RenderableType] = [Text(turn.text, style="cyan")]
    title = f"turn {turn.id + 1}{_by(turn)} · {turn.completion_tokens} tokens"
    title += f" · {turn.count} answers the same" if turn.count > 1 else ""
    if turn.versions:
        first, last = turn.versions[0].version, turn.versions[-1].version
        title += f" · version {first}" + (f"–{last}" if last != first else "")
    for call in turn.tool_calls:
        parts.append(Text(f"{call.name}({call.arguments})", style="cyan"))
    if turn.outcome is not None:
        outcome = turn.outcome
        parts.append(Text(outcome.observation))
        title += f" · {outcome.action or 'no action'} · reward {outcome.reward:+g}"
        title += f" · format penalty {outcome.penalty:+g}" if outcome.penalty else ""
    if turn.sampling is not None:
        title += f" · {turn.sampling.described()}"
        title += " · out of the loss" if turn.sampling.not_modelled and turn.filtered is None else ""
    if turn.filtered is not None:
        title += f" · out of the loss: {turn.filtered}"
    return Panel(Group(*parts), title=title, title_align="left", expand=False)


def _overview(reader: RunReader, console: Console) -> None:
    summary = reader.summary()
    if summary is None:
        console.print(f"{reader.path}: the run has not ended, or was killed; what is written so far:")
    else:  # a training that plays nothing here has no results, a run without training no training
        if "training" in summary:
            console.print(training_table(summary))
        if "results" in summary:
            console.print(result_table(summary))
            console.print(ledger_table(summary))
    console.print(_list(reader.trajectories()))
    failures = reader.failures()
    for row in failures[:LISTED]:
        line = Text.assemble(("failed", "red"), f" {row['rollout_id']}: {row['reason']}")
        console.print(line, soft_wrap=True)
    if len(failures) > LISTED:
        console.print(f"and {len(failures) - LISTED:,} more failed; all are in failures.jsonl")


def _list(trajectories: Iterable[Trajectory], *, title: str = "trajectories") -> Table:
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
            str(leaf_count(each)),
            f"{each.reward:g}",
            str(each.sampled_tokens),
        )
        table.add_row(each.rollout_id, each.tag, solved, str(each.stop), *figures)
    if left:
        table.caption = f"and {left:,} more"
    return table
