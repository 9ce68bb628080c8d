"""What a training run shows: a live view while it runs, tables when it has ended."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from rollwright.cli.pace import Pace
from rollwright.cli.tables import percent
from rollwright.run.baselines import Baseline
from rollwright.run.training_run import TrainingRun
from rollwright.training.rows import TURNS

REFRESH_SECONDS = 0.5


class TrainingView:
    """What there is to see of a training run while it runs."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._began = time.monotonic()
        self._began_at: int | None = None
        """Steps that were done when training began; `None`: it has not."""

    def pace(self) -> Pace:
        pipeline = self._run.pipeline
        if self._began_at is None and pipeline.stage != "not started":
            self._began_at = pipeline.done  # a resumed run knows now how far it had come
        began = pipeline.done if self._began_at is None else self._began_at
        return Pace(pipeline.done, pipeline.cadence.steps, time.monotonic() - self._began, began)

    def table(self) -> Table:
        return live_table(self._run, self.pace())

    def line(self) -> str:
        """One line for where there is no terminal."""
        run, pipeline, report = self._run, self._run.pipeline, self._run.report
        pace = self.pace()
        parts = [f"step {pipeline.done:,} of {pipeline.cadence.steps:,}, now: {pipeline.stage}", str(pace)]
        if report is not None and report.reward is not None:
            parts.append(f"reward {report.reward:.3f}, {percent(report.success)} solved")
        if report is not None and report.skipped is not None:
            parts.append(f"last batch not trained on: {report.skipped}")
        if run.local is not None:
            activity = run.local.activity.total()
            speed = activity.tokens / max(pace.elapsed, 1e-9)
            parts.append(f"{activity.finished:,} rollouts, {speed:,.0f} sampled tokens/s")
            parts += [f"{each.count:,} × failed: {each}" for each in activity.causes.most_common(1)]
        parts += [
            f"validation {percent(row.get('success'))} after step {row['step']:,}"
            for row in run.validations[-1:]
        ]
        return f"{run.config.name}: {' · '.join(parts)}"


def live_table(run: TrainingRun, pace: Pace) -> Table:
    pipeline, report, local = run.pipeline, run.report, run.local
    table = Table(title=run.config.name, title_justify="left", show_header=False, min_width=60)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("step", f"{pipeline.done:,} of {pipeline.cadence.steps:,} · now: {pipeline.stage}")
    table.add_row("", pace.bar())
    if report is not None:
        reward = "–" if report.reward is None else f"{report.reward:.3f}"
        table.add_row("last batch", f"{reward} mean reward · {percent(report.success)} solved")
        if report.skipped is not None:
            table.add_row("", f"[yellow]not trained on: {report.skipped}[/]")
        gap = "–" if report.gap is None else f"{report.gap:.4f}"
        table.add_row(
            "policy", f"entropy {report.entropy:.3f} · clipped {percent(report.clip_share)} · gap {gap}"
        )
        table.add_row("trainer", f"{report.tokens_per_second:,.0f} tokens/s")
    for row in run.validations[-1:]:
        table.add_row("validation", f"{percent(row.get('success'))} solved after {row['step']:,} steps")
    table.add_row("staleness", _staleness(run.staleness) or "–")
    if local is not None:
        activity = local.activity.total()
        spent = max(pipeline.split.total, 1e-9)
        table.add_row("rollouts", f"{activity.finished:,} done · {local.activity.inflight:,} in flight")
        table.add_row("speed", f"{activity.tokens / spent:,.0f} sampled tokens/s")
    table.add_row("time", _split(pipeline.split.row()))
    return table


def training_table(summary: Mapping[str, Any]) -> Table:
    """What the training came to."""
    training = summary["training"]
    table = Table(show_header=False, title=f"training of {summary['name']}", title_justify="left")
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
    table.add_row("trained tokens by age", _staleness(training["staleness"]) or "–")
    if (ratio := training["length_bias"]["ratio"]) is not None:
        table.add_row("mean length trained / generated", f"{ratio:.3f}")
    table.add_row("time", _split(training["time"]))
    return table


def validation_table(validations: Sequence[Mapping[str, Any]], beside: Mapping[str, Baseline]) -> Table:
    """Greedy play on the same levels after so many steps, with chance and perfect play below."""
    table = Table(title="validation", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
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


def _staleness(tokens: Mapping[Any, int]) -> str:
    total = max(sum(tokens.values()), 1)
    return " · ".join(f"{age}: {100 * count / total:.0f} %" for age, count in sorted(tokens.items()))


def _split(seconds: Mapping[str, float]) -> str:
    return " · ".join(f"{name} {spent:.1f} s" for name, spent in seconds.items() if spent)
