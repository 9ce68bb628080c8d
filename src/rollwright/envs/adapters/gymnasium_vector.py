"""Gymnasium environments that are stepped in batches: the episodes of a vector share one thread.

Always true: an episode has one sub-environment of a `gymnasium.vector.SyncVectorEnv` to itself, and plays exactly as in an
environment of its own. A batch holds the episodes that have an answer at that moment; the sub-environments of the others are
not touched, so no episode waits for another one's model. An exception in one sub-environment fails that episode alone. One
that hangs holds up its vector until `limits.step_timeout`; the vector is then given up, and the next episodes get a new one.
It cannot be forked.
"""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rollwright.aio import future_safe
from rollwright.envs.base import EnvironmentFailure, PromptTemplates, Reset, Step
from rollwright.envs.threaded import BlockingRunner

_Call = tuple[int, str, Any]
"""Place in the vector, operation and its argument."""


class GameVector:
    """One vector and its thread. Its sub-environments are reset only when an episode begins."""

    def __init__(self, make_env: Callable[[], Any], make_game: Callable[[Any], Any], num_envs: int) -> None:
        self.free = list(range(num_envs))
        """Places without an episode."""
        self.given_up = False
        """Whether a call of it may never return."""
        self._make_env, self._make_game, self._num_envs = make_env, make_game, num_envs
        self._vector: Any = None
        self._games: list[Any] = []
        self._runner = BlockingRunner("gymnasium vector")
        self._waiting: list[tuple[_Call, asyncio.Future[Any]]] = []
        self._stepping: asyncio.Task[None] | None = None

    @property
    def is_empty(self) -> bool:
        return len(self.free) == self._num_envs

    async def call(self, place: int, operation: str, argument: Any) -> Any:
        """Calls an operation of the game at a place, in the next batch."""
        if self.given_up:
            raise EnvironmentFailure("an earlier call in its vector was cancelled and may still be running")
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(((place, operation, argument), done))
        if self._stepping is None:
            self._stepping = asyncio.ensure_future(self._run_batches())
        try:
            return await done
        except asyncio.CancelledError:
            self.given_up = True
            raise

    async def close(self) -> None:
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)
        if self._runner.refusal is None and self._vector is not None:
            await self._runner.run(self._vector.close)
        self._runner.close()

    async def _run_batches(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            for (_, done), (value, error) in zip(batch, await self._results(batch), strict=True):
                if done.done():
                    continue
                if error is not None:
                    done.set_exception(error)
                else:
                    done.set_result(value)
        self._stepping = None

    async def _results(self, batch: Sequence[tuple[_Call, Any]]) -> list[tuple[Any, BaseException | None]]:
        try:
            return await self._runner.run(partial(self._step, [call for call, _ in batch]))
        except Exception as error:  # noqa: BLE001 - the vector cannot be made, or its thread is given up
            return [(None, error)] * len(batch)

    def _step(self, calls: Sequence[_Call]) -> list[tuple[Any, BaseException | None]]:
        """In the thread: the vector is made by the first batch, because environments may keep thread-local state."""
        if self._vector is None:
            self._vector = SyncVectorEnv(
                [self._make_env] * self._num_envs, autoreset_mode=AutoresetMode.DISABLED
            )
            self._games = [self._make_game(env) for env in self._vector.envs]
        return [self._call(*each) for each in calls]

    def _call(self, place: int, operation: str, argument: Any) -> tuple[Any, BaseException | None]:
        try:
            return getattr(self._games[place], operation)(argument), None
        except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
            return None, future_safe(error)


class _Vectors:
    """The vectors of equal environments in one event loop."""

    def __init__(self) -> None:
        self.users = 0
        self.open: list[GameVector] = []


_vectors: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, _Vectors]]" = WeakKeyDictionary()


class VectorGymnasium:
    """An environment in a vector; it takes a place with its first reset, and leaves it when it is closed."""

    stateless = False
    """It cannot be forked; see `rollwright.envs.base.can_fork`."""

    def __init__(
        self,
        key: Hashable,
        template: Any,
        make_env: Callable[[], Any],
        make_game: Callable[[Any], Any],
        num_envs: int,
    ) -> None:
        """`key`: equal for environments that may share a vector. `template`: a game that describes itself."""
        self._key = key
        self._template = template
        self._make_vector = partial(GameVector, make_env, make_game, num_envs)
        self._vector: GameVector | None = None
        self._place = -1

    @property
    def instruction(self) -> str:
        return self._template.instruction  # type: ignore[no-any-return]

    @property
    def prompts(self) -> PromptTemplates:
        return self._template.prompts  # type: ignore[no-any-return]

    async def reset(self, seed: int) -> Reset:
        if self._vector is None:
            self._take_place()
        assert self._vector is not None
        return await self._vector.call(self._place, "reset", seed)  # type: ignore[no-any-return]

    async def step(self, answer: str) -> Step:
        if self._vector is None:
            raise EnvironmentFailure("no episode is running; call reset first")
        return await self._vector.call(self._place, "step", answer)  # type: ignore[no-any-return]

    async def close(self) -> None:
        vector, self._vector = self._vector, None
        if vector is None:
            return
        of_loop = _vectors[asyncio.get_running_loop()]
        shared = of_loop[self._key]
        vector.free.append(self._place)
        shared.users -= 1
        ending = [each for each in shared.open if each.is_empty and (each.given_up or not shared.users)]
        shared.open = [each for each in shared.open if each not in ending]
        if not shared.users:
            del of_loop[self._key]
        for each in ending:
            await each.close()

    def actions(self) -> Sequence[str]:
        return self._template.actions()  # type: ignore[no-any-return]

    def best_action(self) -> str | None:
        return None

    def answer(self, action: str) -> str:
        return self._template.answer(action)  # type: ignore[no-any-return]

    def _take_place(self) -> None:
        of_loop = _vectors.setdefault(asyncio.get_running_loop(), {})
        shared = of_loop.setdefault(self._key, _Vectors())
        vector = next((each for each in shared.open if each.free and not each.given_up), None)
        if vector is None:
            vector = self._make_vector()
            shared.open.append(vector)
        shared.users += 1
        self._vector, self._place = vector, vector.free.pop(0)
