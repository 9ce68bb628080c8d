"""Result tables of runs and trainings. Light: reads plain summaries, and imports no part of a run."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from rollwright.run.folder import SIMULATED, TREE_PREFIX

if TYPE_CHECKING:
    from rollwright.engines.base import Capabilities
    from rollwright.run.reference_scores import Baseline


def title_of(title: str, *, simulated: bool) -> Text:
    """The title, marked if the simulated engine has played."""
    return Text.assemble((title, "italic"), (f" · {SIMULATED}", "bold yellow") if simulated else "")


def result_table(summary: Mapping[str, Any]) -> Table:
    """Results by mode and tag, beside random and perfect play."""
    title = title_of(f"results of {summary['name']}", simulated=summary.get("simulated", False))
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("mode", "environment"):
        table.add_column(name, no_wrap=True)
    for name in ("played", "solved", "random", "oracle", "reward", "penalty", "turns", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in summary["results"]:
        table.add_row(
            row["mode"],
            row["tag"],
            f"{row['episodes']:,}",
            percent(row["success"]),
            percent(row["random_success"]),
            percent(row["oracle_success"]),
            f"{row['reward']:.2f}",
            f"{row['penalty']:.2f}",
            f"{row['turns']:.1f}",
            f"{row['tokens']:.0f}",
        )
    return table


def capability_line(can: "Capabilities") -> str:
    """Capabilities of the engine, and whether its trajectories can be trained on."""
    model = f", model {can.model}" if can.model else ""
    if not can.trainable:
        return f"[yellow]engine:[/] {can.engine}{model}: not trainable, {can.missing}"
    modes = ", ".join(can.update_modes) or "none"
    return f"engine: {can.engine}{model}: token ids and log-probabilities; weight updates: {modes}"


def ledger_table(summary: Mapping[str, Any]) -> Table:
    """Fate of every opened rollout, and the cost of the run."""
    title = title_of("where every rollout went", simulated=summary.get("simulated", False))
    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for place, count in summary["ledger"].items():
        if count or place == "opened":
            table.add_row(place, f"{count:,}", style="bold" if place == "opened" else None)
    for row in summary.get("failures", ()):
        table.add_row(_cause("failed", row), f"{row['count']:,}", style="red")
    for reason, count in sorted(summary["reasons"].items()):
        if not (summary.get("failures") and reason.startswith("failed: ")):  # listed above, with its cause
            table.add_row(f"  {reason}", f"{count:,}", style="dim")
    for name, catch in sorted(summary.get("filters", {}).items()):
        table.add_row(f"  filter {name}, for example {catch['example']}", f"{catch['count']:,}", style="dim")
    activity = summary["activity"]
    causes = activity.get("failed_attempt_causes")
    for row in causes or ():
        table.add_row(_cause("failed attempt", row), f"{row['count']:,}", style="yellow")
    if causes is None:  # written by an older release
        for cause, count in sorted(activity["failed_attempts"].items()):
            table.add_row(f"  failed attempt, {cause}", f"{count:,}", style="yellow")
    table.add_section()
    for view, size in summary.get("views", {}).items():
        if size["rows"]:
            rows, tokens, longest = size["rows"], size["tokens"], size["longest"]
            table.add_row(
                f"rows as {view}: rows, tokens, longest row", f"{rows:,} · {tokens:,} · {longest:,}"
            )
    _add_trees(table, summary.get("trees", {}))
    _add_counters(table, summary["results"])
    seconds = max(summary["seconds"], 1e-9)
    table.add_section()
    table.add_row("seconds since it was resumed" if summary.get("resumed") else "seconds", f"{seconds:.1f}")
    table.add_row("turns", f"{activity['turns']:,} ({activity['turns'] / seconds:,.0f}/s)")
    table.add_row("sampled tokens", f"{activity['tokens']:,} ({activity['tokens'] / seconds:,.0f}/s)")
    return table


def _cause(what: str, row: Mapping[str, Any]) -> Text:
    """Plain text, because a message may contain markup characters."""
    example = f" (for example {row['example']})" if row["example"] else ""
    return Text(f"  {what}: {row['cause']}{example}", overflow="fold")


TREE_FIGURES = {
    "leaves": "leaves of trees",
    "tokens_saved": "  sampled tokens saved by sharing",
    "merged": "  answers the same as another",
    "refused": "  answers not in the budget",
    "replayed_steps": "  steps replayed for copies of environments",
    "replay_mismatches": "  copies that diverged and were not used",
}
"""Rows in order; figures that are zero are left out."""


def _add_trees(table: Table, trees: Mapping[str, int]) -> None:
    if trees:
        table.add_section()
    for name, words in TREE_FIGURES.items():
        if count := trees.get(name):
            table.add_row(words, f"{count:,}", style="dim" if words.startswith(" ") else None)


def _add_counters(table: Table, results: Sequence[Mapping[str, Any]]) -> None:
    """Sums of the episodes' own metrics by environment, such as a team's discarded calls."""
    rows = [
        (f"{result['mode']} {result['tag']}: {name}", value)
        for result in results
        for name, value in result.get("counters", {}).items()
        if not name.startswith(TREE_PREFIX)
    ]
    if rows:
        table.add_section()
    for words, value in rows:
        table.add_row(words, f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}", style="dim")


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def training_table(summary: Mapping[str, Any]) -> Table:
    """Figures of a training."""
    from rollwright.training.rows import TURNS

    training = summary["training"]
    title = title_of(f"training of {summary['name']}", simulated=summary.get("simulated", False))
    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    table.add_row("steps", f"{training['steps']:,}")
    table.add_row("weights", (training["weights"] or "–")[:16])
    for reason, count in sorted(training["skipped"].items()):
        table.add_row(f"  steps not trained on: {reason}", f"{count:,}", style="yellow")
    for reason, count in sorted(training["left_out"].items()):
        of_turns = reason.startswith(TURNS)
        what = (
            f"turns out of the loss: {reason.removeprefix(TURNS)}"
            if of_turns
            else f"trajectories left out: {reason}"
        )
        table.add_row(f"  {what}", f"{count:,}", style="yellow")
    table.add_row("trained tokens by age", staleness_line(training["staleness"]) or "–")
    if (ratio := training["length_bias"]["ratio"]) is not None:
        table.add_row("mean length trained / generated", f"{ratio:.3f}")
    table.add_row("time", split_line(training["time"]))
    return table


def validation_table(
    validations: Sequence[Mapping[str, Any]], beside: Mapping[str, "Baseline"], *, simulated: bool
) -> Table:
    """Greedy play on the same levels by step, with random and perfect play below."""
    title = title_of("validation", simulated=simulated)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("after step", "solved", "reward"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in sorted(validations, key=lambda each: int(each["step"])):
        reward = row.get("reward")
        table.add_row(
            f"{row['step']:,}", percent(row.get("success")), "–" if reward is None else f"{reward:.3f}"
        )
    for tag, each in beside.items():
        table.add_row(f"random, {tag}", percent(each.random), "", style="dim")
        table.add_row(f"oracle, {tag}", percent(each.oracle), "", style="dim")
    return table


def staleness_line(tokens: Mapping[Any, int]) -> str:
    """Shares of the trained tokens by their age in policy versions."""
    total = max(sum(tokens.values()), 1)
    return " · ".join(f"{age}: {100 * count / total:.0f} %" for age, count in sorted(tokens.items()))


def split_line(seconds: Mapping[str, float]) -> str:
    """Seconds of each stage of a training."""
    return " · ".join(f"{name} {spent:.1f} s" for name, spent in seconds.items() if spent)
