"""Plain data: one model generation with its sampling parameters, the environment's outcome, and reasons for an end.

Records cannot be part of a reference cycle, so they are excluded from the cyclic garbage collector (`gc=False`), whose
work would otherwise grow with the number of episodes in flight.
"""

import math
from enum import StrEnum

import msgspec

from rollwright.trajectory.arrays import Floats, TokenIds, floats, token_ids
from rollwright.trajectory.usage import TokenUsage

MIN_TEMPERATURE = 0.01
"""Below it engines do not sample as requested: vLLM rounds up to it or decodes greedily, and float32 logits divided by a
smaller number overflow."""


class SamplingParams(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters that shape the sampling distribution, as sent to the engine, under vLLM's names. The defaults are the
    model's own distribution. Token limits and stop strings are not among them, because they change no token's probability;
    nor is the seed, which follows from the call's key."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens that are sampled from; 0: all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    other: tuple[str, ...] = ()
    """Further fields of the request that may change the distribution, such as `logit_bias`."""
    constraint: str = ""
    """Kind of the output format that masked tokens out: `json_object`, `json_schema` or `tool_call`; empty: none did."""

    @property
    def not_modelled(self) -> str | None:
        """Reason why token probabilities are not a softmax of logits over a temperature, which is what trainers compute;
        `None`: they are."""
        if not MIN_TEMPERATURE <= self.temperature < math.inf:
            return f"sampled at temperature {self.temperature:g}"
        if self.constraint:
            # The probabilities are those of the tokens that the format allows; trainers compute them over all tokens.
            return f"sampled under a constraint: {self.constraint}"
        if others := self.beside_temperature():
            return f"sampled with {others[0]}"
        return None

    def beside_temperature(self) -> list[str]:
        """Non-neutral parameters other than the temperature, as `name value`."""
        return [
            f"{name} {getattr(self, name):g}"
            for name in _NUMBERS
            if getattr(self, name) != getattr(_PLAIN, name)
        ] + [*self.other, *([f"constraint {self.constraint}"] if self.constraint else [])]

    def describe(self) -> str:
        """One line for display: the temperature and the non-neutral parameters."""
        return ", ".join([f"temperature {self.temperature:g}", *self.beside_temperature()])


_NUMBERS = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_PLAIN = SamplingParams()


UNDELIVERED = "undelivered"
"""`Turn.filtered` of an answer that the agent never received; later turns do not depend on it."""


LEFT_OUT = "gateway.calls"
"""`Turn.filtered` of a call that a rule of the gateway leaves out of the loss: a title or a summary, for example."""


class FinishReason(StrEnum):
    """Why one generation ended."""

    STOP = "stop"
    """The model ended its turn: end-of-turn token or a stop string."""
    LENGTH = "length"
    """The token limit of the call was reached."""
    ABORT = "abort"
    """Aborted from outside, for example by a weight update; the tokens so far are kept."""


class StopReason(StrEnum):
    """Why an episode ended; exactly one applies. ERROR and the members after it never count as a result."""

    TERMINATED = "terminated"
    """The environment reached a final state."""
    TRUNCATED = "truncated"
    """The environment reached its own step limit."""
    MAX_STEPS = "max_steps"
    """The action limit of the rollout was reached."""
    MAX_LENGTH = "max_length"
    """`sequence_length` left no room for another turn."""
    FILTERED = "filtered"
    """A filter ended the episode."""
    ERROR = "error"
    """A failure at one boundary ended the attempt; `Trajectory.error` says which."""
    STALE = "stale"
    """Its oldest token exceeded the staleness bound."""
    CANCELLED = "cancelled"
    """The result was no longer needed: redundant group member, cancelled rollout, end of the run."""


class Boundary(StrEnum):
    """Component that a failure is attributed to; exactly one per failure."""

    ENGINE = "engine"
    """The policy: an unreachable or failing inference engine, or a malformed response."""
    ENVIRONMENT = "environment"
    """The constructor, `reset` or `step` of an environment raised or hung."""
    TOOL = "tool"
    """A tool could not be run (a tool's own error is an observation, not a failure)."""
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
    """Number of recorded turns when it happened."""


class VersionRun(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """`count` consecutive sampled tokens of policy version `version`."""

    version: int
    count: int


class Outcome(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """The environment's response to a turn."""

    observation: str
    reward: float
    """The task's reward, without format penalty."""
    penalty: float = 0.0
    """Format penalty, separate so that it cannot be mistaken for task reward."""
    terminated: bool = False
    truncated: bool = False
    action: str | None = None
    """The action that the environment parsed; `None`: it found none."""
    valid: bool = True
    """Whether the answer had the requested format and named an existing action."""
    success: bool | None = None
    """Whether the task was solved at this point; `None` if the environment does not report it."""


class ToolCall(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One tool call, as the model wrote it."""

    id: str
    """Unique within the episode; the tool's result refers to it."""
    name: str
    arguments: str
    """JSON text exactly as the model wrote it, possibly invalid."""


class Turn(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """One model generation and the environment's response.

    Two links place it: `after` in the order of decisions, `extends` in the token sequences.
    """

    id: int
    """Its index in the trajectory."""
    after: int | None
    """Id of the preceding decision; `None` at a root of the tree."""
    extends: int | None
    """Id of the turn whose full token sequence the prompt continues; `None`: the prompt starts a sequence."""
    prompt_ids: TokenIds = msgspec.field(default_factory=token_ids)
    """Only the ids that the prompt adds to the extended sequence."""
    sampled_ids: TokenIds = msgspec.field(default_factory=token_ids)
    logprobs: Floats = msgspec.field(default_factory=floats)
    """One per sampled id, under the sampling distribution (after temperature and top-p)."""
    versions: tuple[VersionRun, ...] = ()
    """Run-length encoded policy versions of the sampled ids."""
    text: str = ""
    """The completion as text, for display and environments; never tokenized again."""
    agent: str = "agent"
    finish: FinishReason = FinishReason.STOP
    exact: bool = True
    """Whether the ids are those that the engine sampled; a text-only engine returns none, so its turns are not trainable."""
    prompt_tokens: int = 0
    """Length of the full prompt, as counted by the engine."""
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that a hosted API had in its cache."""
    reasoning_tokens: int = 0
    """Tokens of the completion that a hosted API spent on reasoning."""
    outcome: Outcome | None = None
    """`None` until the environment has responded."""
    filtered: str | None = None
    """The filter that removed it from the loss; `None`: no filter did."""
    count: int = 1
    """Number of identical siblings that it represents."""
    sampling: SamplingParams | None = None
    """Sampling parameters, if they differ from `Trajectory.sampling`."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls reported by a text API; with ids, the calls are parsed from these instead."""
    reasoning: str = ""
    """Reasoning reported by a text API beside the text; with ids, it is parsed from these instead."""
    policy: str = ""
    """Name, among `policies`, of the policy that answered in place of the agent's own; empty: its own did."""
    entropy: float | None = None
    """Entropy of the question, in nats: that of the distribution of the answer's first token. `None`: no branch policy asked,
    or the engine does not tell."""

    @property
    def usage(self) -> TokenUsage:
        """Calls and tokens that it stands for."""
        one = self.prompt_tokens, self.cached_tokens, self.completion_tokens, self.reasoning_tokens
        return TokenUsage(self.count, *(tokens * self.count for tokens in one))

    @property
    def oldest_version(self) -> int:
        return min(run.version for run in self.versions)


def expand_versions(runs: tuple[VersionRun, ...]) -> list[int]:
    """One policy version for each sampled token."""
    return [run.version for run in runs for _ in range(run.count)]
