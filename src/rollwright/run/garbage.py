"""The cyclic garbage collector, told that a run makes many objects and hardly any cycles.

Python looks for cycles each time 700 more objects exist than before. With thousands of episodes in flight that
happens all the time, and finds nothing: what episodes leave behind is freed by reference counts. Looking less often
makes the CPU cost of a turn the same at 64 and at 4,096 episodes.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (100_000, 20, 20)
"""New objects before the youngest are looked at, and how many such looks before the older ones are."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Sets the thresholds, and the old ones again at the end."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
