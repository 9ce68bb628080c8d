"""`@tool`: a function that a model can call.

The function stays what it was and can be called as before. A plain function is run in a thread of its own, so a slow
one delays nobody; it counts against the tool's concurrency limit until the thread has really ended, also when nobody
waits for it any more.
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
from rollwright.tools.time_limit import in_line, limits_the_call

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")

TIME_LIMIT = 60.0
"""Seconds that a call may take, unless the tool says otherwise."""

MAX_LENGTH = 16_384
"""Characters of a result that the model is told, unless the tool says otherwise: about 4,000 tokens."""

Run = Callable[[Mapping[str, Any], ToolContext], Awaitable[Any]]


class TookTooLong(RollwrightError):
    """A call did not end within its tool's time limit."""


class Tool:
    """What a toolbox needs to know of a tool."""

    def __init__(
        self,
        spec: ToolSpec,
        read: Callable[[str], dict[str, Any]],
        run: Run,
        *,
        time_limit: float = TIME_LIMIT,
        concurrency: int | None = None,
        ends_episode: bool = False,
        stateful: bool = False,
        max_length: int = MAX_LENGTH,
    ) -> None:
        """`read` takes the model's JSON apart or raises `BadArguments`; `run` takes what `read` returned. `concurrency`
        is how many calls run at once, of all rollouts together. A successful call with `ends_episode` is the last. The
        calls of a `stateful` tool are run again when an episode is resumed."""
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
        self._gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def name(self) -> str:
        return self.spec.name

    def limited(self, time_limit: float | None = None, concurrency: int | None = None) -> "Tool":
        """The same tool under limits of its own; those that are not given stay."""
        other = copy.copy(self)
        other.time_limit = time_limit or self.time_limit
        other.concurrency = concurrency or self.concurrency
        other._gates = weakref.WeakKeyDictionary()
        return other

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> Any:
        """Runs it; `TookTooLong` when its time limit has passed. Call `enter` first; this leaves again."""
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(self.time_limit)
        started: Awaitable[Any] | None = None
        try:
            async with limit:
                with limits_the_call(limit):
                    started = self.run(arguments, context)
                    return await started
        except TimeoutError as error:
            if limit.expired():
                raise TookTooLong(f"{self.name} gave no result within {self.time_limit:g} s.") from error
            raise
        finally:
            if isinstance(started, _Threaded):
                started.work.add_done_callback(lambda _: _leave_from_thread(loop, self.leave))
            else:
                self.leave()

    async def enter(self) -> None:
        """Waits until one more call may run."""
        if (gate := self._gate()) is None:
            return
        with in_line() if gate.locked() else nullcontext():
            await gate.acquire()

    def leave(self) -> None:
        if (gate := self._gate()) is not None:
            gate.release()

    def _gate(self) -> asyncio.Semaphore | None:
        if self.concurrency is None:
            return None
        loop = asyncio.get_running_loop()
        if loop not in self._gates:
            self._gates[loop] = asyncio.Semaphore(self.concurrency)
        return self._gates[loop]


class FunctionTool(Tool, Generic[Parameters, Answer]):
    """A tool made of a function, which it can still be called as."""

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
            return call() if is_async else _Threaded(call, name)

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
    """Makes a tool of a function: with `@tool`, or with `@tool(...)` and the options of `Tool`.

    Its name and description are the function's own unless others are given; it is stateful when it takes a
    `ToolContext`, unless told otherwise.
    """
    if stateful is not None:
        options["stateful"] = stateful
    if function is not None:
        return FunctionTool(function, name, description, **options)
    return lambda given: FunctionTool(given, name, description, **options)


class _Threaded:
    """A call in a thread of its own, which is a daemon: a hung one holds up nobody, not even the process's end."""

    def __init__(self, call: Callable[[], Any], name: str) -> None:
        self.work: Future[Any] = Future()
        self.work.set_running_or_notify_cancel()
        context = copy_context()
        work = functools.partial(context.run, _work, call, self.work)
        threading.Thread(target=work, name=f"tool {name}", daemon=True).start()

    def __await__(self) -> Any:
        return asyncio.wrap_future(self.work).__await__()


def _work(call: Callable[[], Any], outcome: "Future[Any]") -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - raised again where the call is awaited
        outcome.set_exception(future_safe(error))
    else:
        outcome.set_result(result)


def _leave_from_thread(loop: asyncio.AbstractEventLoop, leave: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop has ended, and the limit with it
        loop.call_soon_threadsafe(leave)
