"""Runs a coroutine on the fastest event loop there is; Ctrl-C cancels it instead of tearing it down."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_async(call: Coroutine[Any, Any, Result]) -> Result:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.run(call)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(call)
