"""When an evaluation may stop: looks at growing numbers of tasks, and intervals that stay valid whichever look stops. Pure.

Always true: the sizes of the looks are fixed before the first task is played, by the number of tasks alone. The interval
of every look is wide enough that *all* of them cover together with the stated confidence, so stopping at the first narrow
one costs no coverage. The price, about a third of the width, is paid by a plan that looks; a plan without a target has one
look, at the end, and pays none.
"""

from dataclasses import dataclass

from rollwright.evaluation.distributions import NORMAL, repeated_looks
from rollwright.evaluation.intervals import CONFIDENCE, ConfidenceInterval, TaskValues

GROWTH = 1.5
"""Factor between two looks: at most a third of the tasks at a stop were not needed, and few looks share the confidence."""


@dataclass(frozen=True)
class StoppingPlan:
    """Numbers of tasks after which the interval is looked at; the last is all of them."""

    looks: tuple[int, ...]
    half_width: float | None
    """Stop at the first look whose interval is at most this far from its middle; `None`: never early."""
    confidence: float = CONFIDENCE

    @classmethod
    def make(
        cls, tasks: int, half_width: float | None, *, first: int, confidence: float = CONFIDENCE
    ) -> "StoppingPlan":
        """`first`: tasks before the first look."""
        looks = []
        size = float(first)
        while half_width is not None and round(size) < tasks:
            looks.append(round(size))
            size *= GROWTH
        return cls((*looks, tasks), half_width, confidence)

    @property
    def look_confidence(self) -> float:
        """Confidence of the interval of a single look."""
        if len(self.looks) == 1:
            return self.confidence
        return 2 * NORMAL.cdf(repeated_looks(self.looks, self.confidence)) - 1

    def interval(self, tasks: TaskValues, *, share: bool) -> ConfidenceInterval | None:
        """Interval of the mean that is valid whichever look it is of."""
        found = tasks.interval(share=share, confidence=self.look_confidence)
        return None if found is None else ConfidenceInterval(found.low, found.high, self.confidence)

    def stops(self, tasks: TaskValues, *, share: bool) -> bool:
        """Whether the evaluation ends with the tasks that were played until a look."""
        if len(tasks.values) >= self.looks[-1]:
            return True
        found = self.interval(tasks, share=share)
        return found is not None and self.half_width is not None and found.half_width <= self.half_width
