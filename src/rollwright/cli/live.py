"""The live view of a run: what is done, what is under way, and what it waits for."""

import asyncio

from rich.table import Table
from rich.text import Text

from rollwright.cli.tables import percent
from rollwright.rollout import Place
from rollwright.run.local import LocalRun

REFRESH_SECONDS = 0.25


class RunView:
    """What there is to see of a run; `table` is drawn again and again."""

    def __init__(self, run: LocalRun) -> None:
        self._run = run
        self._last = (0.0, 0, 0)
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

    def table(self) -> Table:
        self._measure()
        run, activity = self._run, self._run.activity.total()
        places = run.ledger.counts
        table = Table(title=run.config.name, title_justify="left", show_header=False, min_width=60)
        table.add_column(style="dim")
        table.add_column()
        failed = f"[red]{places[Place.FAILED]:,}[/]" if places[Place.FAILED] else "0"
        table.add_row(
            "episodes", f"{activity.finished:,} done · {places[Place.RUNNING]:,} open · {failed} failed"
        )
        left_out = places[Place.FILTERED] + places[Place.STALE] + places[Place.CANCELLED]
        table.add_row(
            "trajectories",
            f"{places[Place.DELIVERED]:,} delivered · {places[Place.WAITING]:,} waiting · {left_out:,} left out",
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
