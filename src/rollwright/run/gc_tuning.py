"""The cyclic garbage collector, told that a run makes many objects and hardly any cycles.

Python looks for cycles each time 700 more objects exist than before. With thousands of episodes in flight that
happens all the time, and finds nothing: what episodes leave behind is freed by reference counts. So here it looks when
there is about as much again as after the last look. As long as as much ends as begins, that is never, however many
episodes there are: a turn costs no more of it at 50,000 than at 1,000. Cycles that somebody's code does leave behind
make the process grow, and are found then, if not at the next look then a few later: of episodes that leave one each,
four times as many wait at most as are in flight.

A server, whose callers must not wait, has looks that are short instead of rare.
"""

import asyncio
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

NEVER = 2**31 - 1
"""Looks at the youngest before an older generation is looked at: the largest number that the collector takes."""


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


@contextmanager
def short_collections(*, whole: bool) -> Iterator[None]:
    """For a server, whose callers wait while the collector looks: it looks at what is new since the last time, and what
    is then still there is not looked at again. So no look takes longer than another, however much the server keeps.

    `whole`: each time the process has twice as many blocks of memory as after the last such look, the event loop looks at
    everything, for whoever keeps cycles for a while. Without it, a cycle that outlives a look is never freed.
    """
    before = gc.get_threshold()
    loop = asyncio.get_running_loop() if whole else None
    after_whole = sys.getallocatedblocks()

    def set_aside(phase: Literal["start", "stop"], info: Mapping[str, Any]) -> None:
        nonlocal after_whole
        if phase == "start":
            return
        gc.freeze()
        blocks = sys.getallocatedblocks()
        if loop is not None and blocks > 2 * after_whole:
            after_whole = blocks  # asked for once
            loop.call_soon_threadsafe(look_at_all)  # a look cannot begin within another

    def look_at_all() -> None:
        nonlocal after_whole
        gc.unfreeze()
        gc.collect()
        after_whole = sys.getallocatedblocks()

    gc.callbacks.append(set_aside)
    gc.set_threshold(LEAST_GROWTH, NEVER, NEVER)
    try:
        gc.freeze()
        yield
    finally:
        gc.callbacks.remove(set_aside)
        gc.unfreeze()
        gc.set_threshold(*before)
