"""A gateway whose policy is the simulated engine with a script, for clients that know nothing of it.

Every request that is refused is noted, so that a test can say that none was.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollwright.agents import Session
from rollwright.engines.base import Generation, Prompt, Sampling
from rollwright.gateway import Gateway, RolloutRecorder
from rollwright.gateway.recorder import REFUSED
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.script import read_script
from rollwright.trajectory import Trajectory, check, full_prompt, samples

SCRIPT: list[dict[str, Any]] = [
    {"system": "(?i)title", "replies": [{"say": "A short title"}]},
    {
        "task": r"weather in (?P<city>\w+)",
        "replies": [
            {"reasoning": "I look it up.", "call": {"name": "get_weather", "arguments": {"city": "{city}"}}},
            {"say": "In {city} it is {result}.", "json": {"city": "{city}", "degrees": 21}},
        ],
    },
    {"replies": [{"say": "All done."}]},
]


SECONDS = 300
"""Time that one program may take; the frameworks alone take up to a minute to import on a busy machine."""


class NotingEngine(SimulatedEngine):
    """Remembers what it made."""

    def __init__(self, script: list[dict[str, Any]]) -> None:
        super().__init__(tokens_per_second=1e6, player=read_script(script))
        self.made: list[tuple[Prompt, Generation]] = []

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        made = await super().generate(prompt, sampling)
        self.made.append((prompt, made))
        return made


class Recorded:
    """One rollout and what was recorded of it."""

    def __init__(self, gateway: Gateway, script: list[dict[str, Any]]) -> None:
        self.engine = NotingEngine(script)
        self.trajectory = Trajectory("ro-1", "at-1", "group", "clients", 0)
        self.session = Session(
            self.trajectory,
            self.engine,
            Sampling(max_tokens=1000),
            ("ro-1",),
            sequence_length=200_000,
            generate_timeout=30.0,
        )
        self.recorder = RolloutRecorder(self.session, self.session.sampling)
        self.gateway = gateway
        access = gateway.open(self.recorder)
        self.base_url, self.api_key = access.base_url, access.api_key

    def assert_served(self, sequences: int) -> None:
        """Nothing was refused; ids are the engine's; each sampled token that can be trained is in the loss once."""
        trajectory = check(self.trajectory)
        assert REFUSED not in trajectory.metrics, self.recorder._refusal
        turns = trajectory.turns
        assert [turn.sampled_ids for turn in turns] == [made.sampled_ids for _, made in self.engine.made]
        for turn, (prompt, _) in zip(turns, self.engine.made, strict=True):
            assert full_prompt(turns, turn.id) == prompt.ids
        rows = samples(trajectory)
        trainable = [turn for turn in turns if trajectory.untrained(turn) is None]
        assert sum(sum(row.mask) for row in rows) == sum(len(turn.sampled_ids) for turn in trainable)
        assert len(rows) == sequences, trajectory.metrics


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    made = Gateway()
    yield made
    await made.close()


@pytest.fixture
async def make_recorded(gateway: Gateway) -> Callable[[list[dict[str, Any]] | None], Recorded]:
    """A rollout whose policy answers by a script; `None`: by the usual one."""
    return lambda script: Recorded(gateway, script or SCRIPT)


@pytest.fixture
async def recorded(make_recorded: Any) -> Recorded:
    return make_recorded(None)


@pytest.fixture(autouse=True)
def no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that would call home are told not to."""
    for name in ("OPENAI_AGENTS_DISABLE_TRACING", "LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "1" if "DISABLE" in name else "false")


async def run(command: Sequence[str], variables: Mapping[str, str], folder: Path) -> str:
    """What a program prints; it fails the test unless it ends well."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "SSL_CERT_FILE") if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**kept, "HOME": str(folder), **variables},
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(SECONDS):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = said.decode(errors="replace")
    assert process.returncode == 0, text[-3000:]
    return text


def variables_for(recorded: Any) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": recorded.base_url,
        "OPENAI_API_BASE": recorded.base_url,
        "OPENAI_API_KEY": recorded.api_key,
        "ANTHROPIC_BASE_URL": recorded.base_url,
        "ANTHROPIC_API_KEY": recorded.api_key,
        "OTEL_SDK_DISABLED": "true",
        "CREWAI_DISABLE_TELEMETRY": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_SILENT_STARTUP": "1",
    }


@pytest.fixture
def run_program() -> Callable[..., Awaitable[str]]:
    """Runs a program that finds the gateway by its variables; returns what it prints."""

    async def run_with(command: Sequence[str], recorded: Recorded, folder: Path, **variables: str) -> str:
        return await run(command, {**variables_for(recorded), **variables}, folder)

    return run_with
