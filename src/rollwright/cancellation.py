"""Who ended a task: its owner, who cancelled it, or the code in it, which raised the same exception by itself.

Foreign code (environments, agents, tools, policies) may raise `CancelledError` of its own: a future that it waited for
was cancelled, a library of its gave up. Nobody has cancelled the task then, and nobody waits for it to end.
"""

import asyncio
import concurrent.futures
from typing import Any


def is_asked_for(error: BaseException) -> bool:
    """Whether this ends the current task from outside: it was cancelled, or its coroutine is being closed."""
    if isinstance(error, asyncio.CancelledError):
        task = _current_task()
        return task is None or task.cancelling() > 0
    # Whoever drops a coroutine closes it, outside of any task; in a task, the code has raised it by itself.
    return isinstance(error, GeneratorExit) and _current_task() is None


def passable(error: BaseException) -> BaseException:
    """The error as one that a future can carry from a thread to an event loop. `StopIteration` cannot be carried at all,
    the other two would look there as if the waiting task had been cancelled, or end the whole event loop."""
    carried = isinstance(error, Exception) and not isinstance(
        error, StopIteration | concurrent.futures.CancelledError
    )
    return error if carried else RuntimeError(f"{type(error).__name__}: {error}")


def _current_task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None
