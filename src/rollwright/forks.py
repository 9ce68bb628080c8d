"""Objects that belong to the process that created them.

A forked child has a copy of every object, but some copies cannot work: a store in memory would diverge, a connection would
be shared by two processes, a worker thread does not exist in the child. There such an object refuses every call with one
line. Calls pay nothing for this, because the object's class is replaced at the fork.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from inspect import isfunction
from typing import Any
from weakref import WeakSet

from rollwright.errors import RollwrightError

_bound: "WeakSet[Any]" = WeakSet()


def bind_to_process(made: object) -> None:
    """Make calls of the object's public methods raise its class's `fork_error` in a forked child; `close` does nothing there."""
    _bound.add(made)


def _refuse_in_fork() -> None:
    for each in list(_bound):
        # Python refuses another class for an object with a different memory layout; the others must still be bound.
        with suppress(TypeError):
            each.__class__ = _refusing_class(type(each))
    _bound.clear()


def _refusing_class(kind: type[Any]) -> type[Any]:
    methods = [name for name in dir(kind) if name[0] != "_" and isfunction(getattr(kind, name))]
    error: type[RollwrightError] = getattr(kind, "fork_error", RollwrightError)
    replaced: dict[str, Any] = {name: _refusal(kind.__name__, error) for name in methods}
    replaced["close"] = _close
    return type(kind.__name__, (kind,), replaced)


def _refusal(name: str, error: type[RollwrightError]) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error(
            f"this {name} was created by process {os.getppid()} and inherited by its fork {os.getpid()}, which has only a"
            " copy of it; accepted: one that is created in the process that uses it"
        )

    return refuse


async def _close(*_: Any) -> None:
    """The connection or thread belongs to the parent."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_in_fork)
