"""A run in one process: a store, workers as coroutines, the policy, and a scheduler for each stream of groups.

Always true: whichever way it ends, the environments and the policy are closed and nothing is left running; an
error in a worker ends the call that waits for a batch instead of leaving it waiting.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from rollwright.config import EnvManagerConfig, RunConfig
from rollwright.errors import ConfigError, RollwrightError
from rollwright.policies.base import Policy
from rollwright.rollout import Activity, Batch, Gate, Role, RolloutContext, RolloutScheduler
from rollwright.rollout.capacity import START, CapacityFinder, Window
from rollwright.rollout.episode import read_episode
from rollwright.run.assembly import SettingsTable, build_policy, make_env
from rollwright.run.garbage import rare_collections
from rollwright.store.contract import Store
from rollwright.store.memory import MemoryStore
from rollwright.store.records import AttemptedRollout
from rollwright.workers import Worker

WATCH_SECONDS = 0.25
"""How often the load on the engine is looked at."""

Result = TypeVar("Result")


class LocalRun:
    """Use it as an async context manager: `async with LocalRun(config) as run: await run.get_batch()`."""

    def __init__(
        self,
        config: RunConfig,
        *,
        policy: Policy | None = None,
        store: Store | None = None,
        on_finished: Callable[[bytes], None] | None = None,
        on_failed: Callable[[str, str], None] | None = None,
    ) -> None:
        self.config = config
        self.settings = SettingsTable(config)
        self.policy = policy or build_policy(config.policy)
        self.store = store or MemoryStore()
        self._forget = store is None
        """Whether the store is this run's own and in memory: nobody else will look at what is settled."""
        self.activity = Activity()
        self.gate = Gate(config.max_inflight or START)
        self.schedulers: list[RolloutScheduler] = []
        """The training stream, where there is one, then one for each validation so far."""
        self._context = RolloutContext(self.store, self._role, make_env, self.gate, self.activity)
        self.on_finished = on_finished
        self.on_failed = on_failed
        self._stack = AsyncExitStack()
        self._work: asyncio.Task[None] | None = None
        self._training: RolloutScheduler | None = None

    async def __aenter__(self) -> Self:
        self._stack.enter_context(rare_collections())
        self._stack.push_async_callback(self.policy.close)
        self._stack.push_async_callback(self.store.close)
        self._work = asyncio.create_task(self._run_workers(), name="workers")
        self._stack.push_async_callback(self._stop_workers)
        if self.config.train_env_manager is not None:
            scheduler = self._scheduler(self.config.train_env_manager, "train", "train")
            self._training = await self._stack.enter_async_context(scheduler)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def get_batch(self, batch_size: int | None = None) -> Batch:
        """The next training batch; see `RolloutScheduler.get_batch`."""
        if self._training is None:
            raise ConfigError("train_env_manager: is not set, so there are no training batches")
        return await self._unless_broken(self._training.get_batch(batch_size or self.config.batch_size))

    async def evaluate(self, number: int = 0) -> Batch:
        """Plays every validation level once, greedily; the levels are the same each time."""
        manager = self.config.val_env_manager
        if manager is None:
            raise ConfigError("val_env_manager: is not set, so there is nothing to validate on")
        async with self._scheduler(manager, "val", f"val{number}") as scheduler:
            return await self._unless_broken(scheduler.get_batch(manager.num_env_groups))

    def _scheduler(self, manager: EnvManagerConfig, mode: str, stream: str) -> RolloutScheduler:
        scheduler = RolloutScheduler(
            self.store,
            self.config,
            manager,
            lambda: self.policy.version,
            mode=mode,
            stream=stream,
            forget=self._forget,
            on_finished=self.on_finished,
            on_failed=self.on_failed,
        )
        self.schedulers.append(scheduler)
        return scheduler

    async def _role(self, claimed: AttemptedRollout) -> Role:
        return Role(self.settings(read_episode(claimed.input)), self.policy)

    async def _unless_broken(self, call: Coroutine[Any, Any, Result]) -> Result:
        """The call's result, or the error that ended the workers."""
        assert self._work is not None
        task = asyncio.create_task(call)
        try:
            await asyncio.wait({task, self._work}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise _first_cause(self._work.exception() or RollwrightError("the workers have stopped"))
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _run_workers(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers():
                tasks.create_task(worker.run())
            if self.config.max_inflight is None:
                tasks.create_task(self._find_capacity())

    def _workers(self) -> list[Worker]:
        """As many as the limit of environments for each asks for."""
        workers: list[Worker] = []
        for name, manager in (("train", self.config.train_env_manager), ("val", self.config.val_env_manager)):
            left = 0 if manager is None else manager.num_envs
            most = None if manager is None else manager.max_env_num_per_worker
            while left > 0:
                share = min(left, most or left)
                workers.append(Worker(self._context, f"{name}-{len(workers)}", share))
                left -= share
        return workers

    async def _stop_workers(self) -> None:
        assert self._work is not None
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)

    async def _find_capacity(self) -> None:
        """Feeds the capacity finder, one window after the other, and sets the gate to what it says."""
        managers = (self.config.train_env_manager, self.config.val_env_manager)
        finder = CapacityFinder(maximum=sum(each.num_envs for each in managers if each is not None))
        clock = asyncio.get_running_loop().time
        activity = self.activity
        while True:
            self.gate.limit = finder.limit
            started, turns, tokens, pressure = clock(), activity.turns, activity.tokens, self._pressure()
            seen, looks = 0, 0
            while not (finder.worth_judging(activity.turns - turns) or self._pressure() > pressure):
                await asyncio.sleep(WATCH_SECONDS)
                seen += activity.inflight
                looks += 1
            finder.observe(
                Window(
                    seconds=max(clock() - started, WATCH_SECONDS),
                    turns=activity.turns - turns,
                    tokens=activity.tokens - tokens,
                    inflight=seen / max(looks, 1),
                    pressure=self._pressure() - pressure,
                )
            )

    def _pressure(self) -> int:
        """How often the engine has said so far that it is too much."""
        return self.activity.overdue + self.policy.pressure


def _first_cause(error: BaseException) -> BaseException:
    """The error that brought the others down, out of what a task group made of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
