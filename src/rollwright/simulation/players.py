"""Policies without a model: they look at the board (`Prompt.env`) and answer in the environment's format.

What is true of every player: a draw depends on the prompt's key alone, so concurrency changes nothing; at
temperature 0 it depends on the prompt's content instead, so equal prompts get equal answers. The
log-probability of an answer is known only as a whole: it stands on the first token and the others have 0, so
the sum over the answer is exact. Stop strings are not applied: an answer is a whole turn.
"""

from dataclasses import dataclass, field
from hashlib import blake2b
from math import log
from typing import ClassVar, NamedTuple

from rollwright.engines.base import EngineError, Generation, Prompt, Sampling
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.errors import ConfigError
from rollwright.rng import KeyPart, draw_pair
from rollwright.trajectory import FinishReason, TokenIds, VersionRun, floats
from rollwright.trajectory.arrays import pack


class Choice(NamedTuple):
    text: str
    logprob: float
    """Of the whole text, under the settings it was chosen with."""


@dataclass(frozen=True)
class SkilledPlayer:
    """Plays the best action with probability `skill`, else one of the existing actions at random.

    Where no best action is known it plays at random. Where neither a best action nor a list of actions
    exists, it answers with an empty action in the right format, which the environment counts as invalid.
    """

    skill: float
    """0: always random; 1: always the best action."""

    renderer: ClassVar[BytesRenderer] = BytesRenderer()
    version: ClassVar[int] = 0
    """A player does not learn."""
    pressure: ClassVar[int] = 0
    name: ClassVar[str] = "skilled player"

    def __post_init__(self) -> None:
        if not 0 <= self.skill <= 1:
            raise ConfigError(f"skill: {self.skill} is not a probability; accepted: 0 to 1")

    def choose(self, prompt: Prompt, sampling: Sampling) -> Choice:
        env = prompt.env
        if env is None:
            raise EngineError(f"the {self.name} needs an environment that lists its actions")
        actions = env.actions()
        best = env.best_action() if self.skill > 0 else None
        skill = self.skill if best is not None else 0.0
        drawn = draw_pair(*draw_key(prompt, sampling), "player")
        if best is not None and drawn.share < skill:
            action = best
        else:
            action = actions[drawn.pick % len(actions)] if actions else ""
        text = env.answer(action)
        if sampling.temperature == 0:
            return Choice(text, 0.0)
        at_random = actions.count(action) / len(actions) if actions else float(action == "")
        return Choice(text, log((1 - skill) * at_random + (skill if action == best else 0.0)))

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        choice = self.choose(prompt, sampling)
        text, ids, finish = limited(choice.text, self.renderer.encode(choice.text), sampling.max_tokens)
        logprobs = floats([0.0]) * len(ids)
        if ids:
            logprobs[0] = choice.logprob
        return Generation(
            text=text,
            sampled_ids=ids,
            logprobs=logprobs,
            versions=(VersionRun(self.version, len(ids)),) if ids else (),
            finish=finish,
            prompt_tokens=len(prompt.ids) if prompt.ids is not None else 0,
            completion_tokens=len(ids),
        )

    async def close(self) -> None:
        """Holds nothing."""


@dataclass(frozen=True)
class RandomPlayer(SkilledPlayer):
    """Any existing action, each as likely as the others."""

    skill: float = field(default=0.0, init=False)
    name: ClassVar[str] = "random player"


@dataclass(frozen=True)
class OraclePlayer(SkilledPlayer):
    """The next action of a shortest solution."""

    skill: float = field(default=1.0, init=False)
    name: ClassVar[str] = "oracle player"


def limited(text: str, ids: TokenIds, max_tokens: int) -> tuple[str, TokenIds, FinishReason]:
    """A whole turn as it is, or what `max_tokens` leaves of it."""
    if len(ids) <= max_tokens:
        return text, ids, FinishReason.STOP
    kept = ids[: max(0, max_tokens)]
    return SkilledPlayer.renderer.decode(kept), kept, FinishReason.LENGTH


def draw_key(prompt: Prompt, sampling: Sampling) -> tuple[KeyPart, ...]:
    """What a sample is keyed by: the call, or at temperature 0 only what the prompt says."""
    if sampling.temperature > 0:
        return prompt.key
    if prompt.ids is not None:
        return ("greedy", blake2b(pack(prompt.ids), digest_size=16).hexdigest())
    return ("greedy", *(part for message in prompt.messages for part in (message.role, message.content)))
