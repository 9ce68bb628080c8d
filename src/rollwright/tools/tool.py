"""`@tool`: makes a function callable by a model.

The function itself can be called as before. A synchronous function runs in its own thread, so that it does not block the
event loop; it occupies a slot of the tool's concurrency limit until the thread ends, even after its call timed out.
"""

import asyncio
import copy
import functools
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from contextvars import copy_context
from typing import Any, Generic, ParamSpec, TypeVar, overload

from rollwright.aio import future_safe
from rollwright.engines.base import ToolSpec
from rollwright.errors import ConfigError, RollwrightError
from rollwright.tools.context import ToolContext
from rollwright.tools.schema import read_signature
from rollwright.tools.time_limit import attach_limit, pause_timer

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")

TIME_LIMIT = 60.0
"""Default time limit of a call, in seconds."""

MAX_LENGTH = 16_384
"""Default length limit of a result in characters: about 4,000 tokens."""

ToolFunction = Callable[[Mapping[str, Any], ToolContext], Awaitable[Any]]


class ToolTimeout(RollwrightError):
    """A call exceeded its tool's time limit."""


class Tool:
    """A tool: its spec, argument parser, function and limits."""

    def __init__(
        self,
        spec: ToolSpec,
        read: Callable[[str], dict[str, Any]],
        run: ToolFunction,
        *,
        time_limit: float = TIME_LIMIT,
        concurrency: int | None = None,
        ends_episode: bool = False,
        stateful: bool = False,
        max_length: int = MAX_LENGTH,
    ) -> None:
        """`read` parses the model's JSON or raises `BadArguments`; `run` receives its result. `concurrency` limits the
        concurrent calls over all rollouts. A successful call of a tool with `ends_episode` ends the episode. Calls of a
        `stateful` tool are executed again when an episode is resumed."""
        for key, value in (
            ("time_limit", time_limit),
            ("concurrency", concurrency),
            ("max_length", max_length),
        ):
            if value is not None and value <= 0:
                raise ConfigError(f"tool {spec.name}: {key} must be more than 0, got {value}")
        self.spec = spec
        self.read = read
        self.run = run
        self.time_limit = time_limit
        self.concurrency = concurrency
        self.ends_episode = ends_episode
        self.stateful = stateful
        self.max_length = max_length
        self._semaphores: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def name(self) -> str:
        """The name by which a model calls it."""
        return self.spec.name

    def with_limits(self, time_limit: float | None = None, concurrency: int | None = None) -> "Tool":
        """A copy of the tool with other limits; `None` keeps the present limit."""
        other = copy.copy(self)
        other.time_limit = time_limit or self.time_limit
        other.concurrency = concurrency or self.concurrency
        other._semaphores = weakref.WeakKeyDictionary()
        return other

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> Any:
        """Runs the tool, or raises `ToolTimeout`. The caller must have awaited `enter`; this method calls `leave`."""
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(self.time_limit)
        started: Awaitable[Any] | None = None
        try:
            async with limit:
                with attach_limit(limit):
                    started = self.run(arguments, context)
                    return await started
        except TimeoutError as error:
            if limit.expired():
                raise ToolTimeout(f"{self.name} gave no result within {self.time_limit:g} s.") from error
            raise
        finally:
            if isinstance(started, _ThreadedCall):
                started.work.add_done_callback(lambda _: _leave_from_thread(loop, self.leave))
            else:
                self.leave()

    async def enter(self) -> None:
        """Waits for a slot of the concurrency limit."""
        if (semaphore := self._semaphore()) is None:
            return
        with pause_timer() if semaphore.locked() else nullcontext():
            await semaphore.acquire()

    def leave(self) -> None:
        """Frees a slot of the concurrency limit."""
        if (semaphore := self._semaphore()) is not None:
            semaphore.release()

    def _semaphore(self) -> asyncio.Semaphore | None:
        if self.concurrency is None:
            return None
        loop = asyncio.get_running_loop()
        if loop not in self._semaphores:
            self._semaphores[loop] = asyncio.Semaphore(self.concurrency)
        return self._semaphores[loop]


class FunctionTool(Tool, Generic[Parameters, Answer]):
    """A tool made from a function; calling it calls the function."""

    def __init__(
        self, function: Callable[Parameters, Answer], name: str | None, about: str | None, **options: Any
    ) -> None:
        name = name or function.__name__
        signature = read_signature(function, name)
        spec = ToolSpec(name, about or signature.description, signature.json_schema())
        is_async = inspect.iscoroutinefunction(function)
        self.function = function

        def run(arguments: Mapping[str, Any], context: ToolContext) -> Awaitable[Any]:
            given = dict(arguments)
            if signature.context is not None:
                given[signature.context] = context
            call: Callable[[], Any] = functools.partial(function, **given)
            return call() if is_async else _ThreadedCall(call, name)

        options.setdefault("stateful", signature.context is not None)
        super().__init__(spec, signature.read, run, **options)
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Answer:
        return self.function(*args, **kwargs)


@overload
def tool(function: Callable[Parameters, Answer], /) -> FunctionTool[Parameters, Answer]: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    time_limit: float = TIME_LIMIT,
    concurrency: int | None = None,
    ends_episode: bool = False,
    stateful: bool | None = None,
    max_length: int = MAX_LENGTH,
) -> Callable[[Callable[Parameters, Answer]], FunctionTool[Parameters, Answer]]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    stateful: bool | None = None,
    **options: Any,
) -> Any:
    """Makes a tool from a function: `@tool`, or `@tool(...)` with the options of `Tool`.

    Name and description default to the function's own; a tool is stateful by default if it takes a `ToolContext`.
    """
    if stateful is not None:
        options["stateful"] = stateful
    if function is not None:
        return FunctionTool(function, name, description, **options)
    return lambda given: FunctionTool(given, name, description, **options)


class _ThreadedCall:
    """A call in its own daemon thread, so that a hung call does not delay the exit of the process."""

    def __init__(self, call: Callable[[], Any], name: str) -> None:
        self.work: Future[Any] = Future()
        self.work.set_running_or_notify_cancel()
        context = copy_context()
        work = functools.partial(context.run, _run_into, call, self.work)
        threading.Thread(target=work, name=f"tool {name}", daemon=True).start()

    def __await__(self) -> Any:
        return asyncio.wrap_future(self.work).__await__()


def _run_into(call: Callable[[], Any], outcome: "Future[Any]") -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - re-raised where the call is awaited
        outcome.set_exception(future_safe(error))
    else:
        outcome.set_result(result)


def _leave_from_thread(loop: asyncio.AbstractEventLoop, leave: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop is closed, and its semaphore with it
        loop.call_soon_threadsafe(leave)
