"""A small laboratory: the real store, workers and scheduler around environments that misbehave on purpose.

Everything runs on a virtual clock, so a second costs nothing and times can be compared exactly.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollwright.agents import ChatAgent
from rollwright.aio import run_virtual
from rollwright.config import RunConfig, build
from rollwright.engines.base import Policy, Sampling
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.envs.base import PromptTemplates, Reset, Step
from rollwright.rollout import (
    Activity,
    Assignment,
    EpisodeSettings,
    InflightLimit,
    RolloutContext,
    RolloutScheduler,
)
from rollwright.rollout.episode import read_episode
from rollwright.rollout.settings import LimitsConfig
from rollwright.rollout.stream import StreamHooks
from rollwright.rollout.worker import RolloutWorker, WorkerSettings
from rollwright.simulation.players import RandomPlayer
from rollwright.store.memory import MemoryStore
from rollwright.store.records import AttemptedRollout
from rollwright.trajectory import Trajectory

Behaviour = Callable[["LabEnv"], Awaitable[float]]
"""Runs inside `step`; returns the reward, or raises, or never returns."""


class LabEnv:
    """Ends after `turns` steps; what a step does is up to the laboratory."""

    prompts = PromptTemplates(system="s", opening="{instruction} {observation}", turn="{observation}")
    instruction = "play"

    def __init__(self, lab: "Lab") -> None:
        self.lab = lab
        self.number = lab.made
        """How many environments were made before this one."""
        self.seed = -1
        self.steps = 0
        lab.made += 1

    async def reset(self, seed: int) -> Reset:
        self.seed, self.steps = seed, 0
        self.lab.resets[seed] += 1
        return Reset(f"level {seed}", {})

    async def step(self, answer: str) -> Step:
        reward = await self.lab.behaviour(self)
        self.steps += 1
        over = self.steps >= self.lab.turns
        return Step(f"step {self.steps}", reward, over, False, {"success": reward > 0})

    async def close(self) -> None:
        self.lab.closed += 1

    def actions(self) -> list[str]:
        return ["a", "b", "c"]

    def best_action(self) -> str | None:
        return "a"

    def answer(self, action: str) -> str:
        return action


class LabHooks(StreamHooks):
    def __init__(self, lab: "Lab") -> None:
        self._lab = lab

    def finished(self, rollout_id: str, encoded: bytes) -> None:
        self._lab.finished.append(Trajectory.from_bytes(encoded))

    def failed(self, rollout_id: str, reason: str) -> None:
        self._lab.failures.append((rollout_id, reason))


class Lab:
    def __init__(
        self,
        behaviour: Behaviour,
        *,
        turns: int = 2,
        policy: Policy | None = None,
        forget: bool = False,
        **config: Any,
    ) -> None:
        self.behaviour = behaviour
        self.forget = forget
        self.turns = turns
        self.policy = policy or RandomPlayer()
        manager = {"num_env_groups": 4, "group_size": 4, "tags": ["Lab"], **config.pop("manager", {})}
        self.config: RunConfig = build({"name": "lab", "train_env_manager": manager, **config})
        self.manager = self.config.train_env_manager
        assert self.manager is not None
        self.made = 0
        self.closed = 0
        self.resets: Counter[int] = Counter()
        self.activity = Activity()
        self.failures: list[tuple[str, str]] = []
        self.finished: list[Trajectory] = []
        self.store: MemoryStore

    def env(self) -> LabEnv:
        return LabEnv(self)

    async def role_settings(self) -> EpisodeSettings:
        limits = self.config.limits
        return self._settings(limits.step_timeout, limits.generate_timeout, limits.episode_timeout, "train")

    def settings(self, episode: Any) -> EpisodeSettings:
        limits = self.config.limits
        return self._settings(
            limits.step_timeout, limits.generate_timeout, limits.episode_timeout, episode.mode
        )

    async def role(self, claimed: AttemptedRollout) -> Assignment:
        return Assignment(self.settings(read_episode(claimed.input)), self.policy)

    def _settings(self, step: float, generate: float, episode: float, mode: str) -> EpisodeSettings:
        if not hasattr(self, "_cache"):
            self._cache: dict[str, EpisodeSettings] = {}
        if mode not in self._cache:
            self._cache[mode] = EpisodeSettings(
                env_type="Lab",
                env_config={},
                agent=ChatAgent(LabEnv.prompts),
                sampling=Sampling(temperature=0.0 if mode == "val" else 1.0),
                max_steps=20,
                sequence_length=self.config.sequence_length,
                limits=LimitsConfig(step_timeout=step, generate_timeout=generate, episode_timeout=episode),
                max_staleness=int(-(-self.config.async_generation_ratio // 1)) if mode == "train" else None,
            )
        return self._cache[mode]

    def run(self, experiment: Callable[["Lab", RolloutScheduler], Awaitable[Any]]) -> Any:
        """Runs the experiment with workers playing beside it; gives what it gives."""

        async def whole() -> Any:
            store = self.store = MemoryStore()
            gate = InflightLimit(10_000)
            context = RolloutContext(store, self.role, lambda _: LabEnv(self), gate, self.activity)
            assert self.manager is not None
            work = asyncio.create_task(
                RolloutWorker(context, "worker-0", WorkerSettings(self.manager.num_envs)).run()
            )
            scheduler = RolloutScheduler(
                store,
                self.config,
                self.manager,
                lambda: self.policy.version,
                mode="train",
                forget=self.forget,
                hooks=LabHooks(self),
            )
            try:
                async with scheduler:
                    trial = asyncio.ensure_future(experiment(self, scheduler))
                    await asyncio.wait({trial, work}, return_when=asyncio.FIRST_COMPLETED)
                    if not trial.done():
                        trial.cancel()
                        work.result()
                    return trial.result()
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                await store.close()

        return run_virtual(whole())


@pytest.fixture
def lab() -> type[Lab]:
    return Lab


async def after(seconds: float, reward: float = 0.0) -> float:
    await asyncio.sleep(seconds)
    return reward


@pytest.fixture
def pause() -> Callable[..., Awaitable[float]]:
    return after


__all__ = ["BytesRenderer"]
