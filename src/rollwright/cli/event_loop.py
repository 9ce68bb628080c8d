"""Runs a coroutine on the fastest available event loop; the first Ctrl-C or SIGTERM cancels it.

Invariants: `run_async` raises `SignalReceived` if a signal has ended the coroutine. A cancellation without a signal is an
error, because code of an episode has cancelled the command's own task then.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any, TypeVar

from rollwright.errors import RollwrightError
from rollwright.signals import INTERRUPTS, SignalReceived

Result = TypeVar("Result")


def run_async(call: Coroutine[Any, Any, Result], *, at_once: bool = False) -> Result:
    """`at_once`: a signal ends the process immediately, because nothing needs to be closed."""
    own: list[BaseException] = []
    with INTERRUPTS.temporarily_installed():
        try:
            with asyncio.Runner(loop_factory=_fastest_loop()) as runner:
                return runner.run(_record_exits(call if at_once else _cancel_on_signal(call), own))
        except asyncio.CancelledError:
            if INTERRUPTS.received is None:
                raise _interference() from None
            raise SignalReceived from None
        except (SystemExit, KeyboardInterrupt) as error:
            if error in own:  # raised by the command itself, for example because its output pipe was closed
                raise
            # Raised in a task that an episode's code has created; inside an episode it would end only the attempt.
            raise RollwrightError(
                f"a task that an episode's code has started raised {type(error).__name__}"
            ) from error


async def _record_exits(call: Coroutine[Any, Any, Result], exits: list[BaseException]) -> Result:
    try:
        return await call
    except (SystemExit, KeyboardInterrupt) as error:
        exits.append(error)
        raise


def _interference() -> RollwrightError:
    from rollwright.rollout.scheduler import FOREIGN_CANCELLATION

    return RollwrightError(f"the command was ended by {FOREIGN_CANCELLATION}")


def _fastest_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def _cancel_on_signal(call: Coroutine[Any, Any, Result]) -> Result:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    cancel = task.cancel
    answered = INTERRUPTS.handled_by(lambda: loop.call_soon_threadsafe(cancel))
    with answered if INTERRUPTS.installed else nullcontext():
        return await call
