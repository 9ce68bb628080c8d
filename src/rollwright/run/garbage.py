"""The cyclic garbage collector, told that a run makes many objects and hardly any cycles.

Python looks for cycles each time 700 more objects exist than before. With thousands of episodes in flight that
happens all the time, and finds nothing: what episodes leave behind is freed by reference counts. So here it looks when
there is about as much again as after the last look. As long as as much ends as begins, that is never, however many
episodes there are: a turn costs no more of it at 50,000 than at 1,000. Cycles that somebody's code does leave behind
make the process grow, and are found then, if not at the next look then a few later: of episodes that leave one each,
four times as many wait at most as are in flight.
"""

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

LEAST_GROWTH = 100_000
"""New objects before the next look, at least."""
BLOCKS_PER_GROWTH = 3
"""Blocks of memory in use, for each new object that the next look waits for; about every third is an object that can be
part of a cycle."""
OLDER = (1, 1)
"""Looks at the youngest before the older ones are looked at too: each of them comes after much growth already."""


def growth(blocks: int) -> int:
    """How many more objects there may be before the next look, with so many blocks of memory in use."""
    return max(LEAST_GROWTH, blocks // BLOCKS_PER_GROWTH)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Sets when to look; at the end all is as before."""
    before = gc.get_threshold()
    gc.callbacks.append(_after_look)
    gc.set_threshold(growth(sys.getallocatedblocks()), *OLDER)
    try:
        yield
    finally:
        gc.callbacks.remove(_after_look)
        gc.set_threshold(*before)


def _after_look(phase: Literal["start", "stop"], info: Mapping[str, Any]) -> None:
    if phase == "stop":
        gc.set_threshold(growth(sys.getallocatedblocks()), *OLDER)
