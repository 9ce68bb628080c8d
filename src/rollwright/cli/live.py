"""The live view of a run: what is done, what is under way, and what it waits for."""

import asyncio
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from rollwright.cli.tables import percent
from rollwright.rollout import Place
from rollwright.run.local import LocalRun

REFRESH_SECONDS = 0.25


class LiveView:
    """Redraws itself until it is left; on anything but a terminal it stays silent."""

    def __init__(self, run: LocalRun, console: Console, *, enabled: bool = True) -> None:
        self._run = run
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._enabled = enabled and console.is_terminal
        self._task: asyncio.Task[None] | None = None
        self._last = (0.0, 0, 0)
        """Time, turns and tokens at the last drawing."""
        self._rates = (0.0, 0.0)

    async def __aenter__(self) -> Self:
        if self._enabled:
            self._live.start()
            self._task = asyncio.create_task(self._draw())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._live.stop()

    async def _draw(self) -> None:
        while True:
            self._live.update(self._table(), refresh=True)
            await asyncio.sleep(REFRESH_SECONDS)

    def _measure(self) -> None:
        """Rates over the last second or so, smoothed over one redraw of the figures."""
        activity = self._run.activity.total()
        now = asyncio.get_running_loop().time()
        before, turns, tokens = self._last
        if now - before >= 1.0:
            passed = now - before
            self._rates = (activity.turns - turns) / passed, (activity.tokens - tokens) / passed
            self._last = (now, activity.turns, activity.tokens)

    def _table(self) -> Table:
        self._measure()
        run, activity = self._run, self._run.activity.total()
        places = {place: sum(each.ledger.counts[place] for each in run.schedulers) for place in Place}
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
        for cause, count in activity.failures.most_common(3):
            table.add_row("failed attempts", f"[yellow]{count:,} × {cause}[/]")
        return table
