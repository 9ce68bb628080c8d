"""Plots of a run: reward and its components, lengths, tokens per leaf, catches of filters, shapes of trees.

The data is computed first, from the run's folder alone and without matplotlib; drawing comes last. A plot without data is
not drawn.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollwright.errors import RollwrightError
from rollwright.run.folder import RunReader
from rollwright.trajectory import Trajectory, leaves, path

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = list[tuple[float, float]]


@dataclass
class RunPicture:
    """Data of all plots of a run."""

    name: str
    rewards: dict[str, Points] = field(default_factory=dict)
    """Mean reward by batch, for each tag and mode."""
    components: dict[str, dict[str, Points]] = field(default_factory=dict)
    """Mean of each reward's component by batch, for each component, then each tag and mode."""
    turns: Counter[int] = field(default_factory=Counter)
    """Training paths by their number of turns."""
    tokens: list[int] = field(default_factory=list)
    """Sampled tokens along each training path."""
    sampled_per_leaf: Points = field(default_factory=list)
    """Sampled tokens per path, by batch."""
    along_path: Points = field(default_factory=list)
    """Tokens along a path, which it would have cost alone, by batch."""
    caught: dict[str, int] = field(default_factory=dict)
    """Catches by filter."""
    leaves: Counter[int] = field(default_factory=Counter)
    """Training rollouts by their number of leaves; empty if all have one."""
    widths: list[float] = field(default_factory=list)
    """Mean number of branches of a training rollout, by depth."""


def picture_of(reader: RunReader) -> RunPicture:
    rows = reader.metrics()
    picture = RunPicture(reader.title)
    for row in rows:
        _add_rewards(picture, row)
    steps = {group: row["step"] for row in rows if row["mode"] == "train" for group in row["groups"]}
    _add_paths(picture, steps, [each for each in reader.trajectories() if each.group_id in steps])
    summary = reader.summary() or {}
    picture.caught = {name: catch["count"] for name, catch in summary.get("filters", {}).items()}
    return picture


def _add_rewards(picture: RunPicture, row: Mapping[str, Any]) -> None:
    for tag, figures in row["tags"].items():
        validated = ", validation" if row["mode"] == "val" else ""
        picture.rewards.setdefault(f"{tag}{validated}", []).append((row["step"], figures["reward"]))
        for name, value in figures.get("components", {}).items():
            lines = picture.components.setdefault(name, {})
            lines.setdefault(f"{tag}{validated}", []).append((row["step"], value))


def _add_paths(picture: RunPicture, steps: Mapping[str, int], played: Sequence[Trajectory]) -> None:
    totals: dict[int, list[int]] = {}
    """By batch: leaves, sampled tokens, tokens along all paths."""
    widths: Counter[int] = Counter()
    for trajectory in played:
        turns = trajectory.turns
        ways = [path(turns, leaf) for leaf in leaves(turns)]
        tokens = [sum(turn.completion_tokens for turn in way) for way in ways]
        picture.turns.update(len(way) for way in ways)
        picture.tokens += tokens
        picture.leaves[len(ways)] += 1
        widths.update(
            depth for depth, _ in {(place, turn.id) for way in ways for place, turn in enumerate(way)}
        )
        total = totals.setdefault(steps[trajectory.group_id], [0, 0, 0])
        for place, value in enumerate((len(ways), trajectory.paid_tokens, sum(tokens))):
            total[place] += value
    for step, (ends, sampled, along) in sorted(totals.items()):
        if ends:
            picture.sampled_per_leaf.append((step, sampled / ends))
            picture.along_path.append((step, along / ends))
    if set(picture.leaves) <= {0, 1}:
        picture.leaves.clear()
    else:
        picture.widths = [widths[depth] / len(played) for depth in range(max(widths) + 1)]


def draw(picture: RunPicture, folder: Path, kind: str) -> list[Path]:
    """Write every plot with data, as `png` or `svg`; returns the files."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RollwrightError("plot needs matplotlib: install rollwright[dashboard]") from error
    folder.mkdir(exist_ok=True)
    written = []
    for name, panels in _pictures(picture).items():
        figure = Figure(figsize=(5.5 * len(panels), 3.8), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        figure.suptitle(picture.name, fontsize="medium")
        for axis, panel in zip(axes, panels, strict=True):
            axis.spines[["top", "right"]].set_visible(False)
            panel(axis)
        written.append(folder / f"{name}.{kind}")
        figure.savefig(written[-1], dpi=150)
    return written


Panel = Callable[["Axes"], None]


def _pictures(picture: RunPicture) -> dict[str, list[Panel]]:
    """Panels of each file, side by side, by file name."""
    found: dict[str, list[Panel]] = {}
    if picture.rewards:
        found["reward"] = [lambda axis: _lines(axis, "reward", "batch", "mean reward", picture.rewards)]
    if picture.components:
        found["components"] = [
            partial(_lines, title=name, x="batch", y="mean", lines=lines)
            for name, lines in sorted(picture.components.items())
        ]
    if picture.tokens:
        found["lengths"] = [
            lambda axis: _bars(axis, "episode lengths", "turns in a path", "paths", picture.turns),
            lambda axis: _histogram(axis, "sampled tokens", "tokens in a path", "paths", picture.tokens),
        ]
        along = {"sampled, for each leaf": picture.sampled_per_leaf}
        if picture.leaves:
            along["along its path"] = picture.along_path
        found["tokens_per_leaf"] = [
            lambda axis: _lines(axis, "tokens per leaf", "batch", "tokens", along, bottom=0)
        ]
    if picture.caught:
        found["filters"] = [lambda axis: _named_bars(axis, "caught by filters", picture.caught)]
    if picture.leaves:
        widths = {depth + 1: width for depth, width in enumerate(picture.widths)}
        found["trees"] = [
            lambda axis: _bars(axis, "leaves of a tree", "leaves", "trees", picture.leaves),
            lambda axis: _bars(axis, "width of a tree", "turn", "mean branches there", widths),
        ]
    return found


def _lines(
    axis: "Axes", title: str, x: str, y: str, lines: Mapping[str, Points], *, bottom: float | None = None
) -> None:
    for name, points in sorted(lines.items()):
        axis.plot(*zip(*points, strict=True), marker="o" if len(points) == 1 else ".", label=name)
    axis.legend(frameon=False, fontsize="small")
    whole_numbers(axis)
    axis.grid(alpha=0.25)
    axis.set_ylim(bottom=bottom)
    if len({place for points in lines.values() for place, _ in points}) == 1:
        from_zero(axis, [value for points in lines.values() for _, value in points])
    axis.set(title=title, xlabel=x, ylabel=y)


def _bars(axis: "Axes", title: str, x: str, y: str, heights: Mapping[int, float]) -> None:
    axis.bar(list(heights), list(heights.values()))
    whole_numbers(axis)
    axis.set(title=title, xlabel=x, ylabel=y)


def _histogram(axis: "Axes", title: str, x: str, y: str, values: Sequence[float]) -> None:
    axis.hist(values, bins="auto")
    whole_numbers(axis)
    axis.set(title=title, xlabel=x, ylabel=y)


def _named_bars(axis: "Axes", title: str, widths: Mapping[str, int]) -> None:
    ordered = sorted(widths.items(), key=lambda each: each[1])
    drawn = axis.barh([name for name, _ in ordered], [width for _, width in ordered])
    axis.bar_label(drawn, padding=3)
    whole_numbers(axis)
    axis.set(title=title, xlabel="turns, trajectories or groups")


NARROWEST = 1.5
"""Smallest width of an integer axis, so that a single value is in its middle."""


def whole_numbers(axis: "Axes") -> None:
    """Place ticks at integers only, also for a single value."""
    from matplotlib.ticker import MaxNLocator

    left, right = axis.get_xlim()
    if right - left < NARROWEST:
        middle = round((left + right) / 2)
        axis.set_xlim(middle - NARROWEST / 2, middle + NARROWEST / 2)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def from_zero(axis: "Axes", values: Sequence[float]) -> None:
    """Let the axis start at zero, to show the height of a single value."""
    low, high = min(0.0, *values), max(0.0, *values)
    room = 0.1 * (high - low) or 1.0
    axis.set_ylim(low - (room if low < 0 else 0.0), high + (room if high > 0 or low == 0 else 0.0))
