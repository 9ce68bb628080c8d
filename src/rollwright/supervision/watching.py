"""Whether a living process is at work: observations in, a verdict out.

True of it: only the watcher's own monotonic clock is trusted, so a node's clock may be wrong; a process is judged by
what it gets done, not by being there; and a watcher that was itself suspended starts counting anew, because nothing
could be seen meanwhile.
"""

from dataclasses import dataclass

from rollwright.supervision.decisions import Ending


@dataclass(frozen=True)
class WatchRules:
    """How long is too long."""

    hang_seconds: float = 900.0
    """Without progress. Longer than the slowest single thing a round does: a training step of a large batch."""
    start_seconds: float = 3600.0
    """Without progress while it starts: a model may have to be downloaded first."""
    stopped_seconds: float = 60.0
    """Suspended: long enough for someone to look at it with a debugger, and to let go."""
    blind_seconds: float = 30.0
    """Between two looks. After a longer gap the watcher itself was not running, and judges nobody by it."""


@dataclass(frozen=True)
class Seen:
    """One look at the process."""

    at: float
    """By the watcher's monotonic clock."""
    beat: int | None
    """Of its heartbeat; `None`: it has not beaten yet."""
    suspended: bool
    """Whether the kernel says that it is stopped."""
    starting: bool = False
    """Whether it says that it is still loading and joining."""


class Watch:
    """Follows one life."""

    def __init__(self, rules: WatchRules, started: float) -> None:
        self._rules = rules
        self._beat: int | None = None
        self._moved = started
        self._looked = started
        self._suspended_since: float | None = None

    def look(self, seen: Seen) -> Ending | None:
        """`None`: leave it alone."""
        rules = self._rules
        if seen.at - self._looked > rules.blind_seconds:
            self._moved = seen.at
            self._suspended_since = None
        self._looked = seen.at
        if seen.beat != self._beat:
            self._beat, self._moved = seen.beat, seen.at
        if not seen.suspended:
            self._suspended_since = None
        elif self._suspended_since is None:
            self._suspended_since = seen.at
        if self._suspended_since is not None and seen.at - self._suspended_since >= rules.stopped_seconds:
            return Ending.STOPPED
        patience = rules.start_seconds if seen.beat is None or seen.starting else rules.hang_seconds
        return Ending.HUNG if seen.at - self._moved >= patience else None
