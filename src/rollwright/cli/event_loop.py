"""Runs a coroutine on the fastest event loop there is; the first Ctrl-C or SIGTERM cancels it instead of tearing it down.

Always true: `SignalReceived` comes out of it if a signal has ended the coroutine. A cancellation that no signal asked for is
an error: code that is played has cancelled the command's own task.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any, TypeVar

from rollwright.errors import RollwrightError
from rollwright.signals import INTERRUPTS, SignalReceived

Result = TypeVar("Result")


def run_async(call: Coroutine[Any, Any, Result], *, at_once: bool = False) -> Result:
    """`at_once`: a signal ends the process right away, because there is nothing to end cleanly."""
    own: list[BaseException] = []
    with INTERRUPTS.temporarily_installed():
        try:
            with asyncio.Runner(loop_factory=_fastest()) as runner:
                return runner.run(_noting_exits(call if at_once else _cancelled_by_signals(call), own))
        except asyncio.CancelledError:
            if INTERRUPTS.received is None:
                raise _interference() from None
            raise SignalReceived from None
        except (SystemExit, KeyboardInterrupt) as error:
            if error in own:  # the command's: whoever read its output is gone, say
                raise
            # Of a task that code which is played has made itself; elsewhere it ends only its attempt.
            raise RollwrightError(
                f"a task that code which is played has started raised {type(error).__name__}"
            ) from error


async def _noting_exits(call: Coroutine[Any, Any, Result], exits: list[BaseException]) -> Result:
    try:
        return await call
    except (SystemExit, KeyboardInterrupt) as error:
        exits.append(error)
        raise


def _interference() -> RollwrightError:
    from rollwright.rollout.scheduler import FOREIGN_CANCELLATION

    return RollwrightError(f"the command was ended by {FOREIGN_CANCELLATION}")


def _fastest() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def _cancelled_by_signals(call: Coroutine[Any, Any, Result]) -> Result:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    cancel = task.cancel
    answered = INTERRUPTS.handled_by(lambda: loop.call_soon_threadsafe(cancel))
    with answered if INTERRUPTS.installed else nullcontext():
        return await call
