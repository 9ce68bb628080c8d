"""User-defined functions as rewards.

Always true: a function receives the parameters that it declares, by name; an unknown parameter is refused when the reward is
built. A plain function runs in a daemon thread, so it blocks neither the event loop nor the exit of the process. A call
that hangs occupies one of a limited number of threads; when all are occupied, later calls time out instead of piling up.
"""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, overload

from rollwright.aio import future_safe
from rollwright.errors import ConfigError
from rollwright.rewards.failure import NoReward
from rollwright.rewards.scored import ScoredAttempt
from rollwright.sandbox.attempts import current_boxes
from rollwright.sandbox.box import Box, BoxError

PARAMETERS = ("task", "trajectory", "answer", "messages", "returned", "box")
"""Parameters that a function may declare."""

BOX = "box"
"""The attempt's box, as the episode has left it; an async function can run commands in it."""

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

Value = float | Mapping[str, float]
"""Value of a reward: one number, or named numbers."""

_MARK = "__rollwright_reward__"


@dataclass(frozen=True)
class RewardOptions:
    """Options of the decorator."""

    name: str | None = None
    weight: float = 1.0
    time_limit: float = 30.0


@overload
def reward(function: AnyFunction, /) -> AnyFunction: ...


@overload
def reward(
    *, name: str | None = None, weight: float = 1.0, time_limit: float = 30.0
) -> Callable[[AnyFunction], AnyFunction]: ...


def reward(
    function: Any = None, /, *, name: str | None = None, weight: float = 1.0, time_limit: float = 30.0
) -> Any:
    """Sets name, weight and time limit of a reward function, which is returned unchanged. Settings override them."""

    def mark(function: AnyFunction) -> AnyFunction:
        parameters_of(function, getattr(function, "__name__", "reward"))
        setattr(function, _MARK, RewardOptions(name, weight, time_limit))
        return function

    return mark if function is None else mark(function)


def options_of(function: Callable[..., Any]) -> RewardOptions:
    """Options of the decorator; the defaults without one."""
    found = getattr(function, _MARK, None)
    return found if isinstance(found, RewardOptions) else RewardOptions()


def parameters_of(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """The known parameters that a function declares; a `ConfigError` names an unknown one."""
    if not callable(function):
        raise ConfigError(f"reward {name}: is a {type(function).__name__}; a function is accepted")
    try:
        declared = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {name}: its parameters cannot be read: {error}") from error
    accepted = ", ".join(PARAMETERS)
    wanted = []
    for each in declared:
        if each.kind is each.VAR_KEYWORD:
            return tuple(each for each in PARAMETERS if each != BOX)
        if each.name in PARAMETERS and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            wanted.append(each.name)
        elif each.default is each.empty and each.kind is not each.VAR_POSITIONAL:
            raise ConfigError(f"reward {name}: unknown parameter {each.name!r}; accepted: {accepted}")
    return tuple(wanted)


def function_name(function: Callable[..., Any]) -> str:
    """The name set by the decorator, else the function's name."""
    inner = function.func if isinstance(function, partial) else function
    named = options_of(function).name or getattr(inner, "__name__", None) or type(inner).__name__
    return "reward" if named == "<lambda>" else str(named)


class FunctionComponent:
    """Evaluates a reward by calling a function."""

    def __init__(self, name: str, function: Callable[..., Any], *, concurrency: int = 16) -> None:
        self._name = name
        self._function = function
        self._wanted = parameters_of(function, name)
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - objects whose call is async
        )
        self._threads = asyncio.Semaphore(concurrency)

    async def evaluate(self, attempt: ScoredAttempt) -> Any:
        """Returns the result of the function, unchecked."""
        given = {each: self._argument(attempt, each) for each in self._wanted if each != BOX}
        if BOX in self._wanted:
            given[BOX] = await _attempt_box()
        if self._is_async:
            return await self._function(**given)
        await self._threads.acquire()
        result = await _run_in_thread(lambda: self._function(**given), self._name, self._threads.release)
        return await result if isinstance(result, Awaitable) else result

    async def close(self) -> None:
        """Releases nothing: threads end with their calls."""

    def _argument(self, attempt: ScoredAttempt, name: str) -> Any:
        # A copy of the row, so that a change by one function is not visible to another.
        return dict(attempt.task) if name == "task" else getattr(attempt, name)


async def _attempt_box() -> Box:
    try:
        return await current_boxes().box()
    except BoxError as error:
        raise NoReward(f"it needs the attempt's box: {error}") from error


async def _run_in_thread(call: Callable[[], Any], name: str, on_end: Callable[[], None]) -> Any:
    """Runs a call in a new daemon thread. `on_end` runs on the event loop when the thread ends, even if its result is no
    longer awaited."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()
    context = copy_context()

    def work() -> None:
        try:
            result, error = context.run(call), None
        except BaseException as raised:  # noqa: BLE001 - raised again where the call is awaited
            result, error = None, future_safe(raised)
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the event loop has ended, and nobody waits
            return

    def settle(result: Any, error: BaseException | None) -> None:
        on_end()
        if outcome.cancelled():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    try:
        threading.Thread(target=work, name=f"reward {name}", daemon=True).start()
    except RuntimeError:  # the machine has no thread left
        on_end()
        raise
    return await outcome
