"""The retry schedule of requests without a reply, as pure code."""

from dataclasses import dataclass

from rollwright.errors import ConfigError


@dataclass(frozen=True)
class RetryRule:
    """Exponential back-off with jitter, up to a total time."""

    give_up_after: float = 60.0
    """Seconds since the first try failed; 0: no retries. A server that restarts is back by then. The default lease, so
    that a worker that cannot reach its store gives up when its rollouts go to others."""
    first: float = 0.05
    """Seconds of the first back-off: a single broken connection is replaced at once."""
    factor: float = 2.0
    longest: float = 2.0
    """Seconds: the longest time until workers notice that a server is back."""

    def __post_init__(self) -> None:
        if not (self.give_up_after >= 0 and 0 <= self.first <= self.longest and self.factor >= 1):
            raise ConfigError(
                f"{self}: accepted are give_up_after of 0 or more, 0 <= first <= longest, a factor of 1 or more"
            )

    def delay(self, try_number: int, elapsed: float, draw: float) -> float | None:
        """Seconds to wait after try `try_number` (from 1) failed; `None`: give up. `draw` is in [0, 1)."""
        if elapsed >= self.give_up_after:
            return None
        # Far beyond the cap already; a larger power would overflow.
        back_off = min(self.longest, self.first * self.factor ** min(try_number - 1, 64))
        return min(back_off * (1 + draw) / 2, self.give_up_after - elapsed)
