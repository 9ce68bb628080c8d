"""The task of simulated nodes: cheap to play and to check, with one right answer for each level.

The environment is real code that verification plays again; only the model is a stand-in: `played_group` writes the answers
that a model would sample, and `QuizScorer` thinks the same of every token.
"""

from collections.abc import Sequence

from rollwright import rng
from rollwright.agents.chat import ChatAgent
from rollwright.engines.base import Sampling
from rollwright.engines.rendering.bytes import END, BytesRenderer
from rollwright.envs.base import PromptTemplates, Reset, Step
from rollwright.rollout.episode import EpisodeSettings
from rollwright.swarm.recipes import TaskBook, task_level, task_seed
from rollwright.trajectory import (
    FinishReason,
    Floats,
    Outcome,
    StopReason,
    TokenIds,
    Trajectory,
    Turn,
    VersionRun,
    floats,
    token_ids,
)

TAG = "Quiz"
TOKENIZER = "bytes"
PROMPTS = PromptTemplates("", "{observation}", "{observation}")


def question(level: int) -> str:
    return f"Which number belongs to {level}?"


def right_answer(level: int) -> str:
    return str(rng.digest("quiz", level) % 1_000_000)


class QuizEnv:
    """One question, one answer."""

    instruction = ""
    prompts = PROMPTS

    def __init__(self) -> None:
        self._level = 0

    async def reset(self, seed: int) -> Reset:
        self._level = seed
        return Reset(question(seed), {})

    async def step(self, answer: str) -> Step:
        reward = float(answer == right_answer(self._level))
        return Step("", reward, True, False, {"success": reward > 0.5, "valid": True})

    async def close(self) -> None:
        """Holds nothing."""


class QuizScorer:
    """A policy that thinks the same of every token; a model would compute the log-probabilities."""

    renderer, version, tokenizer = BytesRenderer(), 0, TOKENIZER

    async def logprobs(self, prompt: TokenIds, sampled: TokenIds) -> Floats:
        return floats([-2.0]) * len(sampled)

    def encode(self, text: str) -> TokenIds:
        return self.renderer.encode(text)


def quiz_book() -> TaskBook:
    """The tasks of every node; holds settings only, so nodes may share it."""
    agent = ChatAgent(PROMPTS, max_steps=1, max_response_length=64)
    settings = EpisodeSettings(
        TAG, {}, agent, Sampling(), max_steps=1, sequence_length=1024, env_factory=QuizEnv
    )
    return TaskBook({TAG: settings})


def played_group(swarm: str, peer: str, index: int, right: Sequence[bool]) -> list[Trajectory]:
    """A group of the peer's stream as it would have been played: one member for each of `right`."""
    level = task_level(task_seed(swarm, peer), index)
    return [_member(f"g{index}-m{place}", level, good, place) for place, good in enumerate(right)]


def _member(name: str, level: int, good: bool, place: int) -> Trajectory:
    text = right_answer(level) if good else f"-{place}"
    ids = token_ids([*text.encode(), END])
    turn = Turn(
        0,
        None,
        None,
        sampled_ids=ids,
        logprobs=floats([-2.0]) * len(ids),
        versions=(VersionRun(0, len(ids)),),
        text=text,
        finish=FinishReason.STOP,
        completion_tokens=len(ids),
        outcome=Outcome("", float(good), terminated=True),
    )
    return Trajectory(
        name, name, name, TAG, level, observation=question(level), turns=[turn], stop=StopReason.TERMINATED
    )
