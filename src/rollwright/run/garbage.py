"""The cyclic garbage collector, told that a run makes many objects and hardly any cycles.

Python looks for cycles each time 700 more objects exist than before. With thousands of episodes in flight that
happens all the time, and finds nothing: what episodes leave behind is freed by reference counts. Looking less often
makes the CPU cost of a turn the same at 64 and at 4,096 episodes.

A look goes over all objects that are new since the last one, and where episodes come and go those are soon all there
are, though hardly more exist than before. So the next look comes when half as many more exist as the last one went
over: what looking costs for each new object stays the same at 50,000 episodes.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

THRESHOLDS = (100_000, 20, 20)
"""New objects before the youngest are looked at, at least, and how many such looks before the older ones are."""

SHARE = 0.5
"""More objects than before the next look, as a share of those that the last one went over: cycles that nobody frees can
take half as much memory again as is in use before they are found."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Sets the thresholds, and the old ones again at the end."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    gc.callbacks.append(_set_next)
    try:
        yield
    finally:
        gc.callbacks.remove(_set_next)
        gc.set_threshold(*before)


def _set_next(phase: str, look: dict[str, Any]) -> None:
    if phase == "start" and look["generation"] == 0:
        young = len(gc.get_objects(generation=0))
        gc.set_threshold(max(THRESHOLDS[0], int(SHARE * young)), *THRESHOLDS[1:])
