"""Objects that belong to the process that made them.

A fork has a copy of every object, but not of what stands behind some of them: a store in memory goes on twice, a
connection is shared by two who do not know of each other, a thread that would answer is not there. In the fork such an
object refuses every call, in one line. That costs a call nothing: the object is given another class when its process
forks.
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
    """In a fork, calls of its public methods raise its class's `fork_error`; `close` does nothing there."""
    _bound.add(made)


def _refuse_in_fork() -> None:
    for each in list(_bound):
        with suppress(
            TypeError
        ):  # a class of a layout of its own stays as it is, and keeps none of the others back
            each.__class__ = _refusing(type(each))
    _bound.clear()


def _refusing(kind: type[Any]) -> type[Any]:
    methods = [name for name in dir(kind) if name[0] != "_" and isfunction(getattr(kind, name))]
    error: type[RollwrightError] = getattr(kind, "fork_error", RollwrightError)
    replaced: dict[str, Any] = {name: _refusal(kind.__name__, error) for name in methods}
    replaced["close"] = _close
    return type(kind.__name__, (kind,), replaced)


def _refusal(name: str, error: type[RollwrightError]) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error(
            f"this {name} was made by process {os.getppid()} and inherited by a fork, {os.getpid()}, which has only a"
            " copy of it; accepted: one that is made in the process that uses it"
        )

    return refuse


async def _close(*_: Any) -> None:
    """What stands behind it is its maker's."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_in_fork)
