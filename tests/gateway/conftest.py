"""A gateway on loopback over a simulated engine that remembers what it made, and clients that know nothing of either."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollwright.agents import Session
from rollwright.engines.base import Generation, Prompt, Sampling
from rollwright.gateway import Access, CaptureRules, Gateway, RolloutRecorder
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.lengths import LogNormalLength
from rollwright.simulation.script import read_script
from rollwright.trajectory import Trajectory


class Talker:
    """A board without actions: the engine says filler text, of a length that is drawn for each call."""

    def actions(self) -> list[str]:
        return []

    def best_action(self) -> str | None:
        return None

    def answer(self, action: str) -> str:
        return " ✓ done"


class Engine(SimulatedEngine):
    """Remembers each prompt it was given and what it made of it."""

    def __init__(self, **options: Any) -> None:
        lengths = LogNormalLength(40, 0.5)
        super().__init__(**{"tokens_per_second": 1e6, "lengths": lengths, **options})
        self.made: list[tuple[Prompt, Sampling, Generation]] = []

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        made = await super().generate(prompt, sampling)
        self.made.append((prompt, sampling, made))
        return made


class Played:
    """One rollout behind a gateway."""

    def __init__(self, gateway: Gateway, engine: Any, rollout_id: str, **options: Any) -> None:
        self.sampling = options.pop("sampling", Sampling(max_tokens=256))
        rules = options.pop("rules", CaptureRules())
        self.trajectory = Trajectory(rollout_id, f"at-{rollout_id}", "group", "gateway", 0)
        self.session = Session(
            self.trajectory,
            engine,
            self.sampling,
            (rollout_id,),
            **{"sequence_length": 100_000, "generate_timeout": 30.0, "env": Talker(), **options},
        )
        self.recorder = RolloutRecorder(self.session, self.sampling, rules=rules)
        self.gateway = gateway
        self.access: Access = gateway.open(self.recorder)

    async def close(self) -> Trajectory:
        await self.gateway.close_rollout(self.recorder)
        return self.trajectory


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    made = Gateway()
    yield made
    await made.close()


@pytest.fixture
async def played(gateway: Gateway, engine: Engine) -> Played:
    return Played(gateway, engine, "ro-1")


@asynccontextmanager
async def openai_client(access: Access, **options: Any) -> AsyncIterator[Any]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, **options) as client:
        yield client


@asynccontextmanager
async def anthropic_client(access: Access, **options: Any) -> AsyncIterator[Any]:
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=access.base_url, api_key=access.api_key, **options) as client:
        yield client


@pytest.fixture
def clients() -> Any:
    """Makers of clients, because test files cannot import each other."""

    class Clients:
        openai = staticmethod(openai_client)
        anthropic = staticmethod(anthropic_client)
        rollout = Played
        engine = Engine

        @staticmethod
        def scripted(*entries: dict[str, Any]) -> Engine:
            """An engine that answers by a script."""
            return Engine(player=read_script(list(entries)))

    return Clients
