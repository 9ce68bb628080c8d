"""Progress of a run or a training: a live table in a terminal, a plain line now and then elsewhere.

Invariants: only terminals are drawn on, and the drawing is removed at the end; lines are printed only where nothing is
drawn. The remaining time is estimated from the pace of this process alone, because an earlier one, before a resume, had its
own pace.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollwright.cli.console import clock_time, plain_lines
from rollwright.cli.tables import percent, split_line, staleness_line, title_of
from rollwright.config import RunConfig
from rollwright.rollout import Fate
from rollwright.run.folder import SIMULATED
from rollwright.run.run import Run

if TYPE_CHECKING:
    from rollwright.run.training import TrainingRun

RUN_REFRESH, TRAINING_REFRESH = 0.25, 0.5
"""Seconds between two refreshes: a training step takes longer than a batch of games."""

FIRST_LINE = 2.0
"""Seconds until the first line, so that a user soon sees progress."""

LINES = ((60.0, 5.0), (600.0, 10.0), (float("inf"), 30.0))
"""Pairs of age limit and pause: the older the run, in seconds, the longer the pause between lines."""

BAR_WIDTH = 30


@dataclass(frozen=True)
class Pace:
    """Progress of a piece of work, and its estimated end."""

    done: float
    total: float
    elapsed: float
    """Seconds since this process began."""
    began_at: float = 0.0
    """Part that an earlier process has done."""

    @property
    def share(self) -> float:
        return min(1.0, max(0.0, self.done / self.total)) if self.total > 0 else 0.0

    @property
    def left(self) -> float | None:
        """Estimated seconds until the end; `None` without any progress yet."""
        gained = self.done - self.began_at
        if self.done >= self.total:
            return 0.0
        return self.elapsed / gained * (self.total - self.done) if gained > 0 else None

    def __str__(self) -> str:
        left = "time left not known yet" if self.left is None else f"about {clock_time(self.left)} left"
        return f"{self.share:.0%} · {clock_time(self.elapsed)} elapsed · {left}"

    def bar(self) -> Table:
        """Progress bar with its figures."""
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(total=1.0, completed=self.share, width=BAR_WIDTH), str(self))
        return row


def next_line(elapsed: float) -> float:
    """Seconds until the next line."""
    if elapsed < FIRST_LINE:
        return FIRST_LINE - elapsed
    return next(every for until, every in LINES if elapsed < until)


class LiveDisplay:
    """`async with LiveDisplay(screen, draw, every=0.5):` draws the result of `draw` again after every pause.

    `line` gives the text that is printed now and then if nothing is drawn; `None` prints none.
    """

    def __init__(
        self,
        screen: Console,
        draw: Callable[[], RenderableType],
        *,
        every: float,
        enabled: bool = True,
        line: Callable[[], str] | None = None,
        pause: Callable[[float], float] = next_line,
    ) -> None:
        self._draw = draw
        self._every = every
        self._live = Live(console=screen, transient=True, auto_refresh=False)
        self._enabled = enabled and screen.is_terminal
        self._say = plain_lines(screen)
        self._line = line
        self._pause = pause
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._enabled:
            self._live.start()
            self._task = asyncio.create_task(self._redraw())
        elif self._line is not None:
            self._task = asyncio.create_task(self._print_lines(self._line))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._enabled:
            self._live.stop()

    async def _redraw(self) -> None:
        while True:
            self._live.update(self._draw(), refresh=True)
            await asyncio.sleep(self._every)

    async def _print_lines(self, line: Callable[[], str]) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            await asyncio.sleep(self._pause(clock() - began))
            self._say(line())


class StepsDone(Protocol):
    """Counts the finished training batches of a run."""

    steps: int


def episodes_wanted(config: RunConfig) -> int:
    """Episodes that a whole run delivers: its batches, and the levels of every validation."""
    steps = config.max_steps if config.train_env_manager is not None else 0
    training = steps * config.batch_size
    if config.val_env_manager is None:
        return training
    between = 0 if config.eval_steps is None or not steps else (steps - 1) // config.eval_steps
    manager = config.val_env_manager
    return training + (between + 1) * manager.num_env_groups * manager.group_size


class RunView:
    """Progress, speed and failures of a run, as a table and as a line."""

    def __init__(self, run: Run, progress: "StepsDone") -> None:
        """`progress` counts the finished batches."""
        self._run = run
        self._progress = progress
        self._began = asyncio.get_running_loop().time()
        self._began_at = self._episodes_done()
        self._last = (self._began, 0, 0)
        """Time, turns and tokens at the last measurement."""
        self._rates = (0.0, 0.0)

    def _measure(self) -> None:
        """Update the rates, once a second at most."""
        activity = self._run.activity.total()
        now = asyncio.get_running_loop().time()
        before, turns, tokens = self._last
        if now - before >= 1.0:
            passed = now - before
            self._rates = (activity.turns - turns) / passed, (activity.tokens - tokens) / passed
            self._last = (now, activity.turns, activity.tokens)

    def _episodes_done(self) -> int:
        """Episodes of the run that are delivered, or finished and waiting for delivery."""
        places = self._run.ledger.counts
        return min(places[Fate.DELIVERED] + places[Fate.WAITING], episodes_wanted(self._run.config))

    def pace(self) -> Pace:
        elapsed = asyncio.get_running_loop().time() - self._began
        return Pace(self._episodes_done(), episodes_wanted(self._run.config), elapsed, self._began_at)

    def line(self) -> str:
        """Progress as one line."""
        self._measure()
        run, activity = self._run, self._run.activity.total()
        failed = run.ledger.counts[Fate.FAILED]
        parts = [self._step(), str(self.pace()), f"{activity.finished:,} episodes played"]
        if activity.finished:
            done = activity.finished
            parts.append(f"reward {activity.reward / done:.3f}, {percent(activity.successes / done)} solved")
        parts.append(f"{self._rates[0]:,.0f} turns/s, {self._rates[1]:,.0f} tokens/s")
        if run.config.budget is not None or run.config.prices:
            parts.append(f"spent {run.costs.status()}")
        if failed:
            parts.append(f"{failed:,} failed")
        if worst := activity.causes.most_common(1):
            parts.append(f"most frequent failure: {worst[0].count:,} × {worst[0]}")
        return f"{_line_head(run.config.name, simulated=run.config.plays_simulated)}: {' · '.join(parts)}"

    def _step(self) -> str:
        if self._run.config.train_env_manager is None:
            return "validation" if self._run.config.evaluation is None else "evaluation"
        return f"batch {self._progress.steps:,} of {self._run.config.max_steps:,}"

    def table(self) -> Table:
        self._measure()
        run, activity = self._run, self._run.activity.total()
        places = run.ledger.counts
        title = title_of(run.config.name, simulated=run.config.plays_simulated)
        table = Table(title=title, title_justify="left", show_header=False, min_width=60)
        table.add_column(style="dim")
        table.add_column()
        table.add_row("progress", self._step())
        table.add_row("", self.pace().bar())
        failed = f"[red]{places[Fate.FAILED]:,}[/]" if places[Fate.FAILED] else "0"
        table.add_row(
            "episodes", f"{activity.finished:,} done · {places[Fate.RUNNING]:,} open · {failed} failed"
        )
        left_out = places[Fate.FILTERED] + places[Fate.STALE] + places[Fate.CANCELLED]
        table.add_row(
            "trajectories",
            f"{places[Fate.DELIVERED]:,} delivered · {places[Fate.WAITING]:,} waiting · {left_out:,} left out",
        )
        table.add_row("in flight", f"{run.activity.inflight:,} of at most {run.workers.most_inflight:,}")
        waiting = " · ".join(
            f"{count:,} {phase}" for phase, count in sorted(run.activity.waiting_on().items())
        )
        table.add_row("waiting for", waiting or "–")
        table.add_row("speed", f"{self._rates[0]:,.0f} turns/s · {self._rates[1]:,.0f} tokens/s")
        done = max(activity.finished, 1)
        reward = f"{activity.reward / done:.3f} mean reward · {percent(activity.successes / done)} solved"
        table.add_row("so far", reward if activity.finished else "–")
        if run.config.budget is not None or run.config.prices:
            table.add_row("spent", run.costs.status())
        for cause in activity.causes.most_common(3):
            table.add_row("failed attempts", Text(f"{cause.count:,} × {cause}", style="yellow"))
        return table


class TrainingView:
    """Progress and last figures of a training, as a table and as a line."""

    def __init__(self, run: "TrainingRun") -> None:
        self._run = run
        self._began = time.monotonic()
        self._began_at: int | None = None
        """Steps that were done before this process started to train; `None` until it has."""

    def pace(self) -> Pace:
        pipeline = self._run.pipeline
        if self._began_at is None and pipeline.stage != "not started":
            self._began_at = pipeline.done  # by now a resumed run has read its earlier steps
        began = pipeline.done if self._began_at is None else self._began_at
        return Pace(pipeline.done, pipeline.cadence.steps, time.monotonic() - self._began, began)

    def table(self) -> Table:
        return training_live_table(self._run, self.pace())

    def line(self) -> str:
        """Progress as one line."""
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
            if run.config.budget is not None or run.config.prices:
                parts.append(f"spent {run.local.costs.status()}")
        parts += [
            f"validation {percent(row.get('success'))} after step {row['step']:,}"
            for row in run.state.validations[-1:]
        ]
        return f"{_line_head(run.config.name, simulated=run.is_simulated)}: {' · '.join(parts)}"


def _line_head(name: str, *, simulated: bool) -> str:
    return f"{name} ({SIMULATED})" if simulated else name


def training_live_table(run: "TrainingRun", pace: Pace) -> Table:
    pipeline, report, local = run.pipeline, run.report, run.local
    title = title_of(run.config.name, simulated=run.is_simulated)
    table = Table(title=title, title_justify="left", show_header=False, min_width=60)
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
    for row in run.state.validations[-1:]:
        table.add_row("validation", f"{percent(row.get('success'))} solved after {row['step']:,} steps")
    table.add_row("staleness", staleness_line(run.state.staleness) or "–")
    if local is not None:
        activity = local.activity.total()
        spent = max(pipeline.split.total, 1e-9)
        table.add_row("rollouts", f"{activity.finished:,} done · {local.activity.inflight:,} in flight")
        table.add_row("speed", f"{activity.tokens / spent:,.0f} sampled tokens/s")
        if run.config.budget is not None or run.config.prices:
            table.add_row("spent", local.costs.status())
    table.add_row("time", split_line(pipeline.split.row()))
    return table
