"""Shows one group or one trajectory of a run, with the results of its filters and its advantages.

A run's log holds trajectories as they were played; the run's own filters are applied again here.
"""

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from rollwright.cli.trajectory_view import leaf_count, render, tree_view
from rollwright.errors import ConfigError
from rollwright.observe.judged_group import batch_advantages, caught_beside, filters_for, judged_group
from rollwright.observe.prompt_text import PromptReader
from rollwright.rollout.filters import Catches, Filter, judge
from rollwright.run.folder import RunReader
from rollwright.training.advantages import turn_means
from rollwright.trajectory import Trajectory


def show_group(reader: RunReader, group: Sequence[Trajectory], screen: Console) -> None:
    """Print the catches of the run's filters in a group."""
    screen.print(_caught(_filters(reader, group[0], screen), group))


def show_trajectory(
    reader: RunReader, trajectory: Trajectory, screen: Console, *, prompts: bool, turns: bool
) -> None:
    filters = _filters(reader, trajectory, screen)
    group = judged_group(
        filters, [each for each in reader.trajectories() if each.group_id == trajectory.group_id]
    )
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
    for caught in caught_beside(filters, group.judged, trajectory.rollout_id):
        screen.print(f"[yellow]caught by filter {caught}[/], beside the others of its group", highlight=False)
    if (replaced := group.replaced.get(trajectory.rollout_id)) is not None:
        screen.print(f"[yellow]replaced by another rollout, because of filter {replaced}[/]", highlight=False)
    if group.dropped is not None:
        screen.print(f"[yellow]{_left_out(group.dropped)}[/]", highlight=False)


def _filters(reader: RunReader, trajectory: Trajectory, screen: Console) -> tuple[Filter, ...]:
    """Filters that apply to the trajectory: only training has any."""
    try:
        return filters_for(reader.config, trajectory.group_id)
    except ConfigError as error:  # a user's own filter that cannot be imported here
        screen.print(f"[yellow]shown without filters:[/] {error}", highlight=False)
        return ()


def _caught(filters: Sequence[Filter], group: Sequence[Trajectory]) -> RenderableType:
    in_group = judged_group(filters, group)
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


def _advantages(
    reader: RunReader, trajectory: Trajectory, members: Sequence[Trajectory]
) -> tuple[str, list[float]]:
    """Name of the advantage estimator and its values for the turns of one trajectory."""
    others = [each for each in members if each.rollout_id != trajectory.rollout_id]
    name, values = batch_advantages(reader.config, [[trajectory, *others]])
    return name, turn_means(values[0][0])
