"""Players: policies without a model that inspect the environment (`Prompt.env`) and answer in its format.

Always true of every player: a draw depends on the prompt's key alone, so concurrency changes nothing; at temperature 0 it
depends on the prompt's content instead, so equal prompts get equal answers. The log-probability of an answer is known only
as a whole: the first token carries it and the others have 0, so the sum over the answer is exact. Stop strings are not
applied, because an answer is a whole turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import log
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from rollwright.engines.base import EngineError, Generation, Policy, Prompt, Sampling
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.engines.settings import OraclePolicyConfig, RandomPolicyConfig
from rollwright.errors import ConfigError
from rollwright.rng import KeyPart, draw_pair
from rollwright.simulation.instances import instance
from rollwright.trajectory import FinishReason, TokenIds, VersionRun, floats
from rollwright.trajectory.arrays import pack


class Choice(NamedTuple):
    """A player's answer."""

    text: str
    logprob: float
    """Log-probability of the whole text under the sampling settings of the call."""
    whole: bool = False
    """Whether nothing may stand in front of it: a script's answer, or one under an output format."""
    entropy: float | None = None
    """Entropy of the choice in nats, if the call asked for alternatives; `None`: unknown."""


class Player(Protocol):
    """Chooses the answers of a simulated engine."""

    @property
    def renderer(self) -> BytesRenderer: ...

    def choose(self, prompt: Prompt, sampling: Sampling) -> Choice: ...


@dataclass(frozen=True)
class SkilledPlayer:
    """Plays the best action with probability `skill`, otherwise one of the existing actions at random.

    It plays at random where no best action is known. Where the environment also lists no actions, it answers with an empty
    action in the right format, which the environment counts as invalid.
    """

    skill: float
    """0: always random; 1: always the best action."""

    renderer: ClassVar[BytesRenderer] = BytesRenderer()
    version: ClassVar[int] = 0
    """Constant: a player does not learn."""
    pressure: ClassVar[int] = 0
    constrains_output: ClassVar[bool] = True
    name: ClassVar[str] = "skilled player"

    def __post_init__(self) -> None:
        if not 0 <= self.skill <= 1:
            raise ConfigError(f"skill: {self.skill} is not a probability; accepted: 0 to 1")

    def choose(self, prompt: Prompt, sampling: Sampling) -> Choice:
        """The player's answer; under an output format, an instance of its schema."""
        if sampling.output is not None:
            made = instance(sampling.output.schema, *draw_key(prompt, sampling))
            return Choice(msgspec.json.encode(made).decode(), 0.0, whole=True)
        return self.play(prompt, sampling)

    def play(self, prompt: Prompt, sampling: Sampling) -> Choice:
        env = prompt.env
        if env is None:
            raise EngineError(
                f"the {self.name} needs an environment that lists its actions; `policy.script` says what to answer in others"
            )
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
            return Choice(text, 0.0, entropy=0.0)
        at_random = actions.count(action) / len(actions) if actions else float(action == "")
        logprob = log((1 - skill) * at_random + (skill if action == best else 0.0))
        if not sampling.top_logprobs:
            return Choice(text, logprob)
        return Choice(text, logprob, entropy=_choice_entropy(actions, best, skill))

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        choice = self.choose(prompt, sampling)
        text, ids, finish = cut_to(choice.text, self.renderer.encode(choice.text), sampling.max_tokens)
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
            entropy=choice.entropy if sampling.top_logprobs else None,
        )

    async def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True)
class RandomPlayer(SkilledPlayer):
    """Plays any existing action with equal probability."""

    skill: float = field(default=0.0, init=False)
    name: ClassVar[str] = "random player"


@dataclass(frozen=True)
class OraclePlayer(SkilledPlayer):
    """Plays the next action of a shortest solution."""

    skill: float = field(default=1.0, init=False)
    name: ClassVar[str] = "oracle player"


def _choice_entropy(actions: Sequence[str], best: str | None, skill: float) -> float:
    """Entropy in nats of playing `best` with probability `skill`, otherwise any of `actions`."""
    shares = {each: (1 - skill) * actions.count(each) / len(actions) for each in actions} or {"": 1 - skill}
    if best is not None:
        shares[best] = shares.get(best, 0.0) + skill
    return -sum(share * log(share) for share in shares.values() if share > 0)


def cut_to(text: str, ids: TokenIds, max_tokens: int) -> tuple[str, TokenIds, FinishReason]:
    """Cut a whole turn to `max_tokens`; return its text, ids and finish reason."""
    if len(ids) <= max_tokens:
        return text, ids, FinishReason.STOP
    kept = ids[: max(0, max_tokens)]
    return SkilledPlayer.renderer.decode(kept), kept, FinishReason.LENGTH


def draw_key(prompt: Prompt, sampling: Sampling) -> tuple[KeyPart, ...]:
    """The key of a sample's draws: the call's key, or at temperature 0 the content of the prompt."""
    if sampling.temperature > 0:
        return prompt.key
    if prompt.ids is not None:
        return ("greedy", blake2b(pack(prompt.ids), digest_size=16).hexdigest())
    return ("greedy", *(part for message in prompt.messages for part in (message.role, message.content)))


def make_random(settings: RandomPolicyConfig) -> Policy:
    return RandomPlayer()


def make_oracle(settings: OraclePolicyConfig) -> Policy:
    return OraclePlayer()
