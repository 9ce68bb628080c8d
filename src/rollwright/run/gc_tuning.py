"""Settings of Python's cyclic garbage collector for processes with many objects and hardly any cycles.

By default the collector runs each time 700 more objects exist than before. With thousands of episodes in flight it runs
all the time and finds nothing: reference counts free what episodes leave behind. So here it runs when the heap has about
doubled since the last collection. As long as as many episodes end as begin, that is never: a turn costs no more of it at
50,000 episodes than at 1,000. Cycles that a user's code does leave behind make the process grow, and are found then, if not
by the next collection then a few later: of episodes that leave one each, at most four times as many wait as are in flight.

A server, whose callers must not wait, has short collections instead of rare ones.
"""

import asyncio
import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

LEAST_GROWTH = 100_000
"""Least number of new objects before the next collection."""
BLOCKS_PER_GROWTH = 3
"""Allocated blocks per new object that the next collection waits for; about every third block is an object that can be part
of a cycle."""
OLDER = (1, 1)
"""Collections of a generation before the next older one is collected too: each comes after much growth already."""

NEVER = 2**31 - 1
"""Threshold that keeps older generations from being collected: the largest number that the collector takes."""


def growth(blocks: int) -> int:
    """New objects before the next collection, with this many allocated blocks."""
    return max(LEAST_GROWTH, blocks // BLOCKS_PER_GROWTH)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect rarely inside the block; restore the thresholds at its end."""
    before = gc.get_threshold()
    gc.callbacks.append(_raise_threshold)
    gc.set_threshold(growth(sys.getallocatedblocks()), *OLDER)
    try:
        yield
    finally:
        gc.callbacks.remove(_raise_threshold)
        gc.set_threshold(*before)


@contextmanager
def no_collections() -> Iterator[None]:
    """Collect nothing inside the block, in which very many objects end: each of thousands of cancelled episodes leaves errors
    and tracebacks, and collections over all that is still there would take longer than the end itself. What is left counts as
    old afterwards: otherwise the first new object would start the collection that was avoided, in a process that perhaps only
    exits. Cycles among it are found by the next collection of old objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # else the caller's frozen objects would thaw
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _raise_threshold(phase: Literal["start", "stop"], info: Mapping[str, Any]) -> None:
    if phase == "stop":
        gc.set_threshold(growth(sys.getallocatedblocks()), *OLDER)


@contextmanager
def short_collections(*, whole: bool) -> Iterator[None]:
    """For a server, whose callers wait during a collection: only objects that are new since the last collection are
    examined, and survivors are frozen. So all collections take equally long, however much the server keeps.

    `whole`: each time the process has twice as many allocated blocks as after the last full collection, the event loop runs
    a full one, for code that keeps cycles for a while. Without it, a cycle that survives one collection is never freed.
    """
    before = gc.get_threshold()
    loop = asyncio.get_running_loop() if whole else None
    after_whole = sys.getallocatedblocks()

    def freeze_survivors(phase: Literal["start", "stop"], info: Mapping[str, Any]) -> None:
        nonlocal after_whole
        if phase == "start":
            return
        gc.freeze()
        blocks = sys.getallocatedblocks()
        if loop is not None and blocks > 2 * after_whole:
            after_whole = blocks  # requested once
            loop.call_soon_threadsafe(collect_all)  # a collection cannot start within another

    def collect_all() -> None:
        nonlocal after_whole
        gc.unfreeze()
        gc.collect()
        after_whole = sys.getallocatedblocks()

    gc.callbacks.append(freeze_survivors)
    gc.set_threshold(LEAST_GROWTH, NEVER, NEVER)
    try:
        gc.freeze()
        yield
    finally:
        gc.callbacks.remove(freeze_survivors)
        gc.unfreeze()
        gc.set_threshold(*before)
