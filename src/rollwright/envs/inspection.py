"""Opens an environment to inspect it, without playing: what it says of itself, or whether it can be made at all.

Always true: the environment is closed afterwards, also when the inspection raises. One that does not close in time is left
to a daemon thread, which holds up nobody.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rollwright.envs.base import Env

CLOSE_SECONDS = 5.0
"""Inspections happen while a run is prepared, which must not hang with one environment."""


@contextmanager
def inspected_env(make: Callable[[], Env]) -> Iterator[Env]:
    """A new environment, closed at the end. For code without an event loop, or in one."""
    env = make()
    try:
        yield env
    finally:
        # In a thread with an event loop of its own, because `close` is async and a loop may run in this one.
        closing = threading.Thread(target=_close, args=(env,), name="closing an environment", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def _close(env: Env) -> None:
    with suppress(BaseException):  # it has said what it was asked for; it is never played
        asyncio.run(env.close())
