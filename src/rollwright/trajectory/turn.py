"""Plain data: the distribution that a turn's tokens were drawn from, and whether a trainer can compute it again.

Always true: what only says where a completion ends (token limit, stop texts) changes no token's probability and is not
in it; the seed is not either, because it follows from the call's key.

Plain data: one model generation, what followed it, and why things ended.

Records hold no reference to anything that could refer back to them, so they are kept out of the cyclic garbage
collector (`gc=False`): its work would otherwise grow with the number of episodes in flight.
"""

import math
from enum import StrEnum

import msgspec

from rollwright.trajectory.arrays import Floats, TokenIds, floats, token_ids

MIN_TEMPERATURE = 0.01
"""Below it engines sample something else than they were told: vLLM rounds up to it or takes the likeliest token, and
float32 logits divided by less overflow."""


class SamplingParams(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """As the engine was told them, under vLLM's names. The defaults are the model's own distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Likeliest tokens that were sampled from; 0: all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    other: tuple[str, ...] = ()
    """Further fields of the request that may change the distribution, such as `logit_bias`."""

    @property
    def not_modelled(self) -> str | None:
        """Why the probability of a token is not that of the model's logits over a temperature, which is what trainers
        compute; `None`: it is."""
        if not MIN_TEMPERATURE <= self.temperature < math.inf:
            return f"sampled at temperature {self.temperature:g}"
        if others := self.beside_temperature():
            return f"sampled with {others[0]}"
        return None

    def beside_temperature(self) -> list[str]:
        """What else shapes the distribution, as `name value`."""
        return [
            f"{name} {getattr(self, name):g}"
            for name in _NUMBERS
            if getattr(self, name) != getattr(_PLAIN, name)
        ] + list(self.other)

    def described(self) -> str:
        """For people: the temperature, and whatever else is not neutral."""
        return ", ".join([f"temperature {self.temperature:g}", *self.beside_temperature()])


_NUMBERS = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_PLAIN = SamplingParams()


UNDELIVERED = "undelivered"
"""`Turn.filtered` of an answer that reached nobody: what follows was not decided by it."""


class FinishReason(StrEnum):
    """Why one generation ended."""

    STOP = "stop"
    """The model ended its turn: end-of-turn token or a stop string."""
    LENGTH = "length"
    """The token limit of the call was reached."""
    ABORT = "abort"
    """Cut off from outside, for example by a weight update; the tokens so far are kept."""


class StopReason(StrEnum):
    """Why an episode ended. Exactly one applies; the ones after ERROR never count as a result."""

    TERMINATED = "terminated"
    """The environment reached a final state."""
    TRUNCATED = "truncated"
    """The environment itself cut the episode, as its own limit says."""
    MAX_STEPS = "max_steps"
    """The action limit of the rollout was reached."""
    MAX_LENGTH = "max_length"
    """No room was left in `sequence_length` for another turn."""
    FILTERED = "filtered"
    """A filter ended it at a turn that it caught."""
    ERROR = "error"
    """A failure at one boundary ended the attempt; `Trajectory.error` says which."""
    STALE = "stale"
    """Its oldest token became older than the staleness bound allows."""
    CANCELLED = "cancelled"
    """Nobody needed it any more: redundant group member, cancelled rollout, end of the run."""


class Boundary(StrEnum):
    """Where a failure came from. Every failure is put down to exactly one."""

    ENGINE = "engine"
    """The policy: an unreachable or failing inference engine, a broken answer."""
    ENVIRONMENT = "environment"
    """`reset`, `step` or the making of an environment raised or hung."""
    TOOL = "tool"
    """A tool could not be run at all (a tool's own error message is an observation, not a failure)."""
    AGENT = "agent"
    """The agent's code raised."""
    REWARD = "reward"
    """A reward function or judge raised, hung or gave no number."""
    SYSTEM = "system"
    """Everything else: the time limit of the episode, the worker, the machine."""


class ErrorRecord(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One failure, as data."""

    boundary: Boundary
    kind: str
    """Name of the exception's class, or `timeout`."""
    message: str
    turn: int
    """How many turns had been recorded when it happened."""


class VersionRun(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """`count` consecutive sampled tokens made by policy version `version`."""

    version: int
    count: int


class Outcome(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """What the environment answered to a turn."""

    observation: str
    reward: float
    """The task's own reward; a format penalty is never in it."""
    penalty: float = 0.0
    """What an answer in the wrong format costs, kept apart so that it cannot pass as task reward."""
    terminated: bool = False
    truncated: bool = False
    action: str | None = None
    """The action as the environment understood it; `None`: it understood none."""
    valid: bool = True
    """Whether the answer had the format that was asked for and named an existing action."""
    success: bool | None = None
    """Whether the task was solved then; `None` where the environment does not say."""


class ToolCall(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One call of a tool, as the model asked for it."""

    id: str
    """Unique in its episode; the tool's answer names it."""
    name: str
    arguments: str
    """JSON as text, exactly as the model wrote it; it need not be valid."""


class Turn(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """One model generation and what followed it.

    Two links place it: `after` in the order of decisions, `extends` in the token sequences.
    """

    id: int
    """Its index in the trajectory."""
    after: int | None
    """The decision before it; `None` at a root of the tree."""
    extends: int | None
    """The turn whose full token sequence the prompt continues; `None`: the prompt starts a sequence."""
    prompt_ids: TokenIds = msgspec.field(default_factory=token_ids)
    """Only the ids that the prompt adds to what it extends."""
    sampled_ids: TokenIds = msgspec.field(default_factory=token_ids)
    logprobs: Floats = msgspec.field(default_factory=floats)
    """Of the distribution that was sampled from, after temperature and top-p; one for each sampled id."""
    versions: tuple[VersionRun, ...] = ()
    """Which policy version made which of the sampled ids, in order."""
    text: str = ""
    """The completion as text, for people and environments; never encoded again."""
    agent: str = "agent"
    finish: FinishReason = FinishReason.STOP
    exact: bool = True
    """Whether the ids are those the engine sampled. A text-only engine gives none: not trainable."""
    prompt_tokens: int = 0
    """Length of the whole prompt, as the engine counted it."""
    completion_tokens: int = 0
    outcome: Outcome | None = None
    """`None` until the environment has answered."""
    filtered: str | None = None
    """The filter that took it out of the loss; `None`: none did."""
    count: int = 1
    """How many siblings that came out the same it stands for."""
    sampling: SamplingParams | None = None
    """How its tokens were drawn, where that was not as the rollout's (`Trajectory.sampling`)."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls that a text API told of; where there are ids, the calls are read from them."""

    @property
    def oldest_version(self) -> int:
        return min(run.version for run in self.versions)


def expand_versions(runs: tuple[VersionRun, ...]) -> list[int]:
    """One policy version for each sampled token."""
    return [run.version for run in runs for _ in range(run.count)]
