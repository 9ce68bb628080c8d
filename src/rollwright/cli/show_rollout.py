"""Shows one group or one trajectory of a run, with the results of its filters and its advantages.

A run's log holds trajectories as they were played; the run's own filters are applied again here.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.text import Text

from rollwright.cli.trajectory_view import PromptReader, leaf_count, render, tree_view
from rollwright.errors import ConfigError
from rollwright.rollout.filters import (
    Catches,
    Filter,
    GroupTest,
    MemberTest,
    build_filters,
    judge,
    judge_group,
)
from rollwright.run.build_training import make_training_advantage
from rollwright.run.folder import RunReader
from rollwright.training.advantages import TurnTree as TreeCredit
from rollwright.training.advantages import turn_means
from rollwright.trajectory import Trajectory


def show_group(reader: RunReader, group: Sequence[Trajectory], screen: Console) -> None:
    """Print the catches of the run's filters in a group."""
    screen.print(_caught(_filters(reader, group[0], screen), group))


def show_trajectory(
    reader: RunReader, trajectory: Trajectory, screen: Console, *, prompts: bool, turns: bool
) -> None:
    filters = _filters(reader, trajectory, screen)
    group = _judged(filters, [each for each in reader.trajectories() if each.group_id == trajectory.group_id])
    catches = Catches()
    alone = judge(filters, trajectory, catches).trajectory
    left = next((each for each in group.members if each.rollout_id == trajectory.rollout_id), alone)
    is_tree = leaf_count(trajectory) > 1
    asked = PromptReader(reader.config) if prompts else None
    screen.print(render(left, asked, turns=turns or not is_tree, simulated=reader.simulated))
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


def _filters(reader: RunReader, trajectory: Trajectory, screen: Console) -> tuple[Filter, ...]:
    """Filters that apply to the trajectory: only training has any."""
    config = reader.config
    if config.train_env_manager is None or not trajectory.group_id.startswith(f"{config.name}.train-"):
        return ()
    try:
        return build_filters(config.train_env_manager)
    except ConfigError as error:  # a user's own filter that cannot be imported here
        screen.print(f"[yellow]shown without filters:[/] {error}", highlight=False)
        return ()


class _InGroup(NamedTuple):
    """A group after its filters."""

    judged: list[Trajectory]
    """Members that were not replaced, after the filters of turns and trajectories."""
    members: list[Trajectory]
    """The same members after all filters."""
    catches: Catches
    replaced: dict[str, str]
    """Names of the filters that replaced a rollout, by rollout."""
    dropped: str | None
    """Name of the filter that drops the whole group."""


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


def _caught_beside(filters: Sequence[Filter], members: Sequence[Trajectory], rollout_id: str) -> list[str]:
    """Names of the filters that caught this member by comparison with the group, or the whole group."""
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
    """Name of the advantage estimator and its values: the training's, or `tree` for a run without training."""
    others = [each for each in members if each.rollout_id != trajectory.rollout_id]
    training = reader.config.training
    name, advantage = (
        ("tree", TreeCredit())
        if training is None
        else (training.advantage.name, make_training_advantage(training))
    )
    return name, turn_means(advantage([[trajectory, *others]])[0][0])
