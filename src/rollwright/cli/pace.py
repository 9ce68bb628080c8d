"""How far something has come and when it will be done, for the live view and for plain lines. Pure.

The estimate is the pace since this process began: what an earlier process did, before a resume, took other time.
"""

from dataclasses import dataclass

from rich.progress_bar import ProgressBar
from rich.table import Table

FIRST_LINE = 2.0
"""Seconds until the first line: whoever waits sees soon that something happens."""

LINES = ((60.0, 5.0), (600.0, 10.0), (float("inf"), 30.0))
"""Seconds between two lines, up to so many seconds after the start: a run of a day does not fill its log."""

BAR_WIDTH = 30


@dataclass(frozen=True)
class Pace:
    """One moment of something that began at `done = began_at`."""

    done: float
    total: float
    elapsed: float
    """Seconds since this process began."""
    began_at: float = 0.0
    """What was done then already."""

    @property
    def share(self) -> float:
        return min(1.0, max(0.0, self.done / self.total)) if self.total > 0 else 0.0

    @property
    def left(self) -> float | None:
        """Seconds until it is done, as far as the pace so far tells; `None`: it does not yet."""
        gained = self.done - self.began_at
        if self.done >= self.total:
            return 0.0
        return self.elapsed / gained * (self.total - self.done) if gained > 0 else None

    def __str__(self) -> str:
        left = "time left not known yet" if self.left is None else f"about {clock_time(self.left)} left"
        return f"{self.share:.0%} · {clock_time(self.elapsed)} elapsed · {left}"

    def bar(self) -> Table:
        """A bar with the figures beside it."""
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(total=1.0, completed=self.share, width=BAR_WIDTH), str(self))
        return row


def clock_time(seconds: float) -> str:
    """Hours, minutes and seconds; the hours only where there are some."""
    whole = round(seconds)
    minutes, hours = whole // 60 % 60, whole // 3600
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def next_line(elapsed: float) -> float:
    """Seconds to wait for the next line, so many seconds after the start."""
    if elapsed < FIRST_LINE:
        return FIRST_LINE - elapsed
    return next(every for until, every in LINES if elapsed < until)
