"""A stage for teams: a policy that says what a script says, an environment that answers, and the real episode loop."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import pytest

from rollwright.agents import ChatAgent, Journal
from rollwright.aio import run_virtual
from rollwright.engines.base import Generation, Policy, Prompt, Sampling
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.envs.base import PromptTemplates, Reset, Step
from rollwright.rollout.episode import Episode, EpisodeSettings, new_session, play_episode
from rollwright.rollout.settings import LimitsConfig
from rollwright.teams import Team
from rollwright.trajectory import FinishReason, Trajectory, VersionRun, floats, samples, turn_samples

EPISODE = Episode("Stage", seed=7, mode="train", group_id="g0", group=0, member=0, run_seed=1)

Line = str | Callable[[str, int], str] | Exception
"""What an agent says; a function gets the prompt and how often the agent was asked before."""


class Script:
    """A policy whose agents say their lines in order, the last one again and again."""

    def __init__(
        self,
        lines: Mapping[str, Sequence[Line]],
        seconds: Mapping[str, float] | None = None,
        version: int = 0,
    ) -> None:
        self.renderer: Any = BytesRenderer()
        self.version = version
        self.pressure = 0
        self.asked: list[str] = []
        """Agents, in the order in which they were asked."""
        self.prompts: list[str] = []
        self.samplings: list[Sampling] = []
        self.running = self.most_running = 0
        self.closed = 0
        self._lines = lines
        self._seconds = seconds or {}

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        agent = str(prompt.key[-2])
        number = self.asked.count(agent)
        text = "" if prompt.ids is None else self.renderer.decode(prompt.ids)
        self.asked.append(agent)
        self.prompts.append(text)
        self.samplings.append(sampling)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self._seconds.get(agent, 1.0))
        finally:
            self.running -= 1
        lines = self._lines[agent]
        line = lines[min(number, len(lines) - 1)]
        if isinstance(line, Exception):
            raise line
        said = line if isinstance(line, str) else line(text, number)
        ids = BytesRenderer().encode(said)
        return Generation(
            said,
            ids,
            floats([-0.5]) * len(ids),
            (VersionRun(self.version, len(ids)),),
            FinishReason.STOP,
            prompt_tokens=0 if prompt.ids is None else len(prompt.ids),
            completion_tokens=len(ids),
        )

    async def close(self) -> None:
        self.closed += 1


class StageEnv:
    """Shows numbered scenes until the last; the reward is for saying the right thing."""

    prompts = PromptTemplates(system="s", opening="{observation}", turn="{observation}")
    instruction = "Play."

    def __init__(self, steps: int = 1, right: str = "42", penalty: float = 0.0) -> None:
        self.steps, self.right, self.penalty = steps, right, penalty
        self.answers: list[str] = []

    async def reset(self, seed: int) -> Reset:
        self.answers = []
        return Reset("QUESTION", {})

    async def step(self, answer: str) -> Step:
        self.answers.append(answer)
        right = self.right in answer
        over = len(self.answers) >= self.steps or right or not answer
        valid = bool(answer) and "WRONG FORMAT" not in answer
        info: Any = {
            "success": right,
            "valid": valid,
            "penalty": 0.0 if valid else self.penalty,
            "action": answer,
        }
        return Step(f"SCENE {len(self.answers)}", float(right), over, False, info)

    async def close(self) -> None:
        pass


class Stage:
    """Plays teams on a virtual clock."""

    Script = Script
    Env = StageEnv

    async def perform(
        self,
        team: Team,
        policy: Policy,
        env: Any = None,
        *,
        max_steps: int | None = None,
        sequence_length: int = 100_000,
        limits: LimitsConfig | None = None,
        journal: Journal | None = None,
        max_staleness: int | None = None,
        member: int = 0,
    ) -> Trajectory:
        env = env or StageEnv()
        settings = EpisodeSettings(
            env_type="Stage",
            env_config={},
            agent=ChatAgent(env.prompts),
            sampling=Sampling(max_tokens=20_000),
            max_steps=max_steps or getattr(env, "steps", 4),
            sequence_length=sequence_length,
            limits=limits or LimitsConfig(generate_timeout=1e6, episode_timeout=1e6),
            strategy=team,
            max_staleness=max_staleness,
        )
        episode = msgspec.structs.replace(EPISODE, member=member)
        session = new_session(
            episode, policy, settings, env, rollout_id=f"r{member}", attempt_id="1", journal=journal
        )
        return await play_episode(session, env, settings, policy, lambda: env)

    def play(self, *args: Any, **options: Any) -> Trajectory:
        return run_virtual(self.perform(*args, **options))

    def timed(self, *args: Any, **options: Any) -> tuple[Trajectory, float]:
        """The trajectory, and the seconds it took."""

        async def measured() -> tuple[Trajectory, float]:
            trajectory = await self.perform(*args, **options)
            return trajectory, asyncio.get_running_loop().time()

        return run_virtual(measured())

    @staticmethod
    def agents(trajectory: Trajectory) -> list[str]:
        return [turn.agent.partition("/")[2] for turn in trajectory.turns]

    @staticmethod
    def trained(trajectory: Trajectory) -> str:
        """A hash of everything that a trainer could see."""
        outcomes = [(turn.agent, turn.after, turn.extends, turn.outcome) for turn in trajectory.turns]
        seen = [
            samples(trajectory),
            turn_samples(trajectory),
            outcomes,
            trajectory.reward,
            trajectory.penalty,
        ]
        return blake2b(msgspec.json.encode(seen, enc_hook=list)).hexdigest()


@pytest.fixture
def stage() -> Stage:
    return Stage()
