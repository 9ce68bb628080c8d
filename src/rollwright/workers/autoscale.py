"""How many workers there should be. Pure: what is waiting goes in, a number comes out.

The number follows the rollouts that wait (queuing and requeuing; claimed ones have their worker already), up to a
maximum. It grows at once, because waiting costs; it shrinks only after a while without need, because starting does.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScaleRules:
    envs_per_worker: int
    """Rollouts that one worker plays at the same time."""
    maximum: int
    minimum: int = 1
    cool_down: float = 30.0
    """Seconds for which fewer must have been enough before the number goes down."""


class Autoscaler:
    def __init__(self, rules: ScaleRules) -> None:
        self._rules = rules
        self._enough_since: float | None = None
        """Since when fewer would have been enough."""

    def wanted(self, waiting: int, claimed: int, workers: int, now: float) -> int:
        """The number of workers to have, given the rollouts that wait, those being played, and the workers there are."""
        rules = self._rules
        needed = -(-(waiting + claimed) // rules.envs_per_worker)
        needed = min(rules.maximum, max(rules.minimum, needed))
        if needed >= workers:
            self._enough_since = None
            return needed
        if self._enough_since is None:
            self._enough_since = now
        if now - self._enough_since < rules.cool_down:
            return workers
        self._enough_since = None
        return needed
