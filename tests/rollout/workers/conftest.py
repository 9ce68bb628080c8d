"""Workers over a store in memory that play plain functions: nothing is simulated but the tasks."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from rollwright.config import build
from rollwright.rollout import Activity, Assignment, InflightLimit, RolloutContext
from rollwright.rollout.episode import EpisodeSettings
from rollwright.rollout.worker import RolloutWorker, WorkerSettings
from rollwright.run.build import function_settings, make_env
from rollwright.simulation.players import RandomPlayer
from rollwright.store.memory import MemoryStore
from rollwright.store.records import AttemptedRollout, RolloutConfig

Agent = Callable[[Any, Any], Awaitable[float]]


class Workshop:
    """A store, and workers that play its rollouts with one function."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.activity = Activity()
        self._running: list[asyncio.Task[None]] = []

    async def enqueue(self, count: int, **rules: Any) -> list[str]:
        config = RolloutConfig(**rules)
        return [
            (await self.store.enqueue_rollout({"task": number}, config=config)).rollout_id
            for number in range(count)
        ]

    def worker(self, agent: Agent, name: str = "worker-0", envs: int = 4, **settings: Any) -> RolloutWorker:
        """One with a gate of its own, as every process has."""
        how = play_settings(agent)

        async def playbook(claimed: AttemptedRollout) -> Assignment:
            return Assignment(how, RandomPlayer(), agent)

        context = RolloutContext(self.store, playbook, make_env, InflightLimit(envs), self.activity)
        return RolloutWorker(context, name, WorkerSettings(envs, **{"resources": None, **settings}))

    def start(self, worker: RolloutWorker) -> "asyncio.Task[None]":
        task = asyncio.create_task(worker.run())
        self._running.append(task)
        return task

    async def by_worker(self) -> dict[str, int]:
        """How many attempts each worker has made."""
        counts: dict[str, int] = {}
        for rollout in await self.store.query_rollouts():
            for attempt in await self.store.query_attempts(rollout.rollout_id):
                name = attempt.worker_id or "nobody"
                counts[name] = counts.get(name, 0) + 1
        return counts

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.store.close()


def play_settings(agent: Agent) -> EpisodeSettings:
    config = build(
        {"policy": {"kind": "random"}, "val_env_manager": {"num_env_groups": 1, "tags": ["FrozenLake"]}}
    )
    return function_settings(config, agent)


@pytest.fixture
def new_workshop() -> type[Workshop]:
    """For tests with a loop of their own."""
    return Workshop


@pytest.fixture
async def workshop() -> AsyncIterator[Workshop]:
    made = Workshop()
    yield made
    await made.close()
