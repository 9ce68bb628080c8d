"""A call's time limit, which stands still while the call waits in line for what others hold.

Otherwise a pool under load would look to the model like a tool that does not work.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

_running: ContextVar[asyncio.Timeout | None] = ContextVar("running time limit of a tool call", default=None)


@contextmanager
def limits_the_call(limit: asyncio.Timeout) -> Iterator[None]:
    """Inside, `in_line` knows whose time runs."""
    token = _running.set(limit)
    try:
        yield
    finally:
        with suppress(ValueError):  # the call was ended from outside its task, whose context is gone
            _running.reset(token)


@contextmanager
def in_line() -> Iterator[None]:
    """The time that passes inside does not count."""
    limit = _running.get()
    until = None if limit is None else limit.when()
    if limit is None or until is None:  # no call, or another part of it waits already
        yield
        return
    clock = asyncio.get_running_loop().time
    left = until - clock()
    limit.reschedule(None)
    try:
        yield
    finally:
        limit.reschedule(clock() + left)
