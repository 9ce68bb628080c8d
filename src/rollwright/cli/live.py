"""The live view of a run: what is done, what is under way, and what it waits for."""

import asyncio
from typing import Protocol

from rich.table import Table
from rich.text import Text

from rollwright.cli.pace import Pace
from rollwright.cli.tables import percent
from rollwright.config import RunConfig
from rollwright.rollout import Fate
from rollwright.run.local import LocalRun

REFRESH_SECONDS = 0.25


class StepsDone(Protocol):
    """Counts the training batches of a run that are there."""

    steps: int


def episodes_wanted(config: RunConfig) -> int:
    """Episodes that a whole run hands out: its batches, and every validation's levels."""
    steps = config.max_steps if config.train_env_manager is not None else 0
    training = steps * config.batch_size
    if config.val_env_manager is None:
        return training
    between = 0 if config.eval_steps is None or not steps else (steps - 1) // config.eval_steps
    return training + (between + 1) * config.val_env_manager.num_env_groups


class RunView:
    """What there is to see of a run; `table` is drawn again and again."""

    def __init__(self, run: LocalRun, progress: "StepsDone") -> None:
        """`progress`: counts the batches that are there."""
        self._run = run
        self._progress = progress
        self._began = asyncio.get_running_loop().time()
        self._began_at = self._episodes_done()
        self._last = (self._began, 0, 0)
        """Time, turns and tokens at the last drawing."""
        self._rates = (0.0, 0.0)

    def _measure(self) -> None:
        """Rates over the last second or so, smoothed over one redraw of the figures."""
        activity = self._run.activity.total()
        now = asyncio.get_running_loop().time()
        before, turns, tokens = self._last
        if now - before >= 1.0:
            passed = now - before
            self._rates = (activity.turns - turns) / passed, (activity.tokens - tokens) / passed
            self._last = (now, activity.turns, activity.tokens)

    def _episodes_done(self) -> int:
        """Of those that the run will hand out: handed out, or finished and waiting for it."""
        places = self._run.ledger.counts
        return min(places[Fate.DELIVERED] + places[Fate.WAITING], episodes_wanted(self._run.config))

    def pace(self) -> Pace:
        elapsed = asyncio.get_running_loop().time() - self._began
        return Pace(self._episodes_done(), episodes_wanted(self._run.config), elapsed, self._began_at)

    def line(self) -> str:
        """One line for where there is no terminal."""
        self._measure()
        run, activity = self._run, self._run.activity.total()
        failed = run.ledger.counts[Fate.FAILED]
        parts = [self._step(), str(self.pace()), f"{activity.finished:,} episodes played"]
        if activity.finished:
            done = activity.finished
            parts.append(f"reward {activity.reward / done:.3f}, {percent(activity.successes / done)} solved")
        parts.append(f"{self._rates[0]:,.0f} turns/s, {self._rates[1]:,.0f} tokens/s")
        if failed:
            parts.append(f"{failed:,} failed")
        if worst := activity.causes.most_common(1):
            parts.append(f"most frequent failure: {worst[0].count:,} × {worst[0]}")
        return f"{run.config.name}: {' · '.join(parts)}"

    def _step(self) -> str:
        if self._run.config.train_env_manager is None:
            return "validation"
        return f"batch {self._progress.steps:,} of {self._run.config.max_steps:,}"

    def table(self) -> Table:
        self._measure()
        run, activity = self._run, self._run.activity.total()
        places = run.ledger.counts
        table = Table(title=run.config.name, title_justify="left", show_header=False, min_width=60)
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
        table.add_row("in flight", f"{run.activity.inflight:,} of at most {run.most_inflight:,}")
        waiting = " · ".join(
            f"{count:,} {phase}" for phase, count in sorted(run.activity.waiting_on().items())
        )
        table.add_row("waiting for", waiting or "–")
        table.add_row("speed", f"{self._rates[0]:,.0f} turns/s · {self._rates[1]:,.0f} tokens/s")
        done = max(activity.finished, 1)
        reward = f"{activity.reward / done:.3f} mean reward · {percent(activity.successes / done)} solved"
        table.add_row("so far", reward if activity.finished else "–")
        for cause in activity.causes.most_common(3):
            table.add_row("failed attempts", Text(f"{cause.count:,} × {cause}", style="yellow"))
        return table
