"""Runs a coroutine on the fastest event loop there is; Ctrl-C and SIGTERM cancel it instead of tearing it down."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_async(call: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=_fastest()) as runner:
        return runner.run(_ending_with_sigterm(call))


def _fastest() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def _ending_with_sigterm(call: Coroutine[Any, Any, Result]) -> Result:
    """Whoever wants to treat SIGTERM otherwise sets a handler of its own."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await call
