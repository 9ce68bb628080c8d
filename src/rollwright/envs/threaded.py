"""Runs synchronous environments in threads.

Each environment has its own thread, so that thread-local state persists and a slow environment blocks no other. A call
that never returns can be cancelled: the environment then refuses further calls, and its daemon thread delays neither the
event loop nor the exit of the process.
"""

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol, Self, TypeVar

from rollwright.aio import future_safe
from rollwright.envs.base import EnvironmentFailure, Forkable, PromptTemplates, Reset, Step
from rollwright.envs.parsing import AnswerFormat

Result = TypeVar("Result")

_Job = tuple[Callable[[], Any], "Future[Any]"]


class BlockingRunner:
    """Runs calls in order in one daemon thread, which ends when the runner is closed or garbage collected."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._started = False
        self._refusal: str | None = None
        weakref.finalize(self, self._jobs.put, None)

    @property
    def refusal(self) -> str | None:
        """Reason for refusing further calls; `None`: calls are accepted."""
        return self._refusal

    async def run(self, call: Callable[[], Result]) -> Result:
        """Runs `call` in the thread."""
        if self._refusal is not None:
            raise EnvironmentFailure(f"{self._name}: {self._refusal}")
        if not self._started:
            threading.Thread(target=_run_jobs, args=(self._jobs,), name=self._name, daemon=True).start()
            self._started = True
        outcome: Future[Result] = Future()
        self._jobs.put((call, outcome))
        try:
            return await asyncio.wrap_future(outcome)
        except (
            asyncio.CancelledError
        ):  # the waiter's cancellation: `future_safe` replaces one that the call raised
            self._refusal = "an earlier call was cancelled and may still be running"
            raise

    def close(self) -> None:
        """Ends the thread after its current call, without waiting for it."""
        self._refusal = self._refusal or "it is closed"
        self._jobs.put(None)


def _run_jobs(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        call, outcome = job
        if not outcome.set_running_or_notify_cancel():
            continue
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - re-raised where the call is awaited
            outcome.set_exception(future_safe(error))
        else:
            outcome.set_result(result)
        del job, call, outcome  # an idle thread must not keep the last call's environment alive


class SyncEnv(Protocol):
    """An environment with synchronous methods; otherwise like `Env`."""

    @property
    def instruction(self) -> str: ...

    @property
    def prompts(self) -> PromptTemplates: ...

    def reset(self, seed: int) -> Reset: ...

    def step(self, answer: str) -> Step: ...

    def close(self) -> None: ...


class ThreadedEnv:
    """Async wrapper of a synchronous environment, which runs in its own thread.

    The optional methods for built-in players (`actions`, `best_action`, `answer`) are delegated if they exist.
    """

    def __init__(self, env: SyncEnv) -> None:
        self._env = env
        self._runner = BlockingRunner(type(env).__name__)

    @property
    def instruction(self) -> str:
        return self._env.instruction

    @property
    def prompts(self) -> PromptTemplates:
        return self._env.prompts

    async def reset(self, seed: int) -> Reset:
        return await self._runner.run(lambda: self._env.reset(seed))

    async def step(self, answer: str) -> Step:
        return await self._runner.run(lambda: self._env.step(answer))

    async def close(self) -> None:
        try:
            if self._runner.refusal is None:
                await self._runner.run(self._env.close)
        finally:
            self._runner.close()

    def actions(self) -> Sequence[str]:
        names: Callable[[], Sequence[str]] | None = getattr(self._env, "actions", None)
        return names() if names else ()

    def best_action(self) -> str | None:
        best: Callable[[], str | None] | None = getattr(self._env, "best_action", None)
        return best() if best else None

    def answer(self, action: str) -> str:
        write: Callable[[str], str] = getattr(self._env, "answer", None) or AnswerFormat().write
        return write(action)


class ForkableThreadedEnv(ThreadedEnv):
    """Wrapper of a synchronous environment that can be forked."""

    def fork(self) -> Self:
        """A copy with its own thread; must not be called during a step."""
        assert isinstance(self._env, Forkable)  # guaranteed by `wrap`
        return type(self)(self._env.fork())


def wrap(env: SyncEnv) -> ThreadedEnv:
    """Wraps a synchronous environment; the wrapper can be forked if the environment can."""
    return ForkableThreadedEnv(env) if isinstance(env, Forkable) else ThreadedEnv(env)
