"""The interface of policies: prompt in, sampled tokens out.

A policy that works in token ids has a `renderer`; the session passes ids, and the policy returns the ids that were sampled. A
policy that speaks text only (a chat API) has no renderer; it gets messages, and its generations are marked as not exact, so
they are never trained.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from math import exp, isfinite, log
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from rollwright.errors import RollwrightError
from rollwright.rng import KeyPart
from rollwright.trajectory import (
    FinishReason,
    Floats,
    Message,
    SamplingParams,
    TokenIds,
    ToolCall,
    VersionRun,
    floats,
    token_ids,
)


class OutputFormat(msgspec.Struct, frozen=True):
    """A constraint on a completion: its whole text is JSON that a schema accepts. Tokens that would break it are masked out
    while it is sampled, so trainers leave the turn out of the loss; see `engines.constraints`."""

    kind: Literal["json_object", "json_schema", "tool_call"]
    schema: dict[str, Any]
    """JSON schema of the whole text. A tool call is an object with its `name` and `arguments`."""
    name: str = ""
    """Name of the schema, for APIs that ask for one."""
    tools: tuple[str, ...] = ()
    """Tools of which one has to be called, or with a JSON kind may be called instead of answering."""
    answer: dict[str, Any] | None = None
    """Schema of an answer alone, if `schema` allows calls beside it."""


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling settings. Log-probabilities are always those of the distribution that these settings give."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    output: OutputFormat | None = None
    """Constraint on the text; only for a policy that `constrains_output`. `None`: any text."""
    top_logprobs: int = 0
    """Likeliest tokens to tell at each place, for a client that asks; an engine that cannot tells none."""

    def params(self) -> SamplingParams:
        """The settings that shape the distribution, as a turn records them."""
        if self.output is not None:
            return SamplingParams(self.temperature, self.top_p, constraint=self.output.kind)
        if self.top_p != 1:
            return SamplingParams(self.temperature, self.top_p)
        # Defaults are left out, so that they take no bytes in the journal, where every turn has a record.
        return SamplingParams() if self.temperature == 1 else SamplingParams(self.temperature)


class ToolSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a tool in the prompt."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments."""


_encode_sorted = msgspec.json.Encoder(order="deterministic").encode


class OfferedTools(tuple[ToolSpec, ...]):
    """Tools that an agent offers with every call. Their JSON, which may take 100 KB, is made once."""

    @cached_property
    def encoded(self) -> bytes:
        return _encode_sorted(tuple(self))


def encoded_tools(tools: Sequence[ToolSpec]) -> bytes:
    """The tools as JSON; equal tools give equal bytes."""
    return tools.encoded if isinstance(tools, OfferedTools) else _encode_sorted(tools)


@runtime_checkable
class Playable(Protocol):
    """An environment that lists its actions, for players without a model."""

    def actions(self) -> Sequence[str]:
        """The actions available now, as the model would name them. Empty: there is no finite list."""
        ...

    def best_action(self) -> str | None:
        """The next action of a shortest solution; `None`: there is none, or it is unknown."""
        ...

    def answer(self, action: str) -> str:
        """A completion that names `action` in the format that the prompt asks for."""
        ...


class NoActions:
    """The `Playable` of a rollout without an environment. Players find no action, so a user's own agent can be tried against a
    simulated engine, which then answers with filler text."""

    def actions(self) -> list[str]:
        return []

    def best_action(self) -> str | None:
        return None

    def answer(self, action: str) -> str:
        return action


NO_ACTIONS: Playable = NoActions()


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """The input of one call."""

    episode: str
    """Rollout id: calls are routed by it, so that an episode stays with one prefix cache."""
    key: tuple[KeyPart, ...]
    """The key of every random draw for this call."""
    messages: Sequence[Message]
    """The conversation, for policies that speak text."""
    ids: TokenIds | None = None
    """The whole prompt in token ids; `None` for a policy without a renderer."""
    env: Playable | None = None
    """For players without a model, which inspect the environment instead of reading the prompt."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools that the model may call, for policies that speak text; `ids` include them already."""
    attempt: int = 1
    """Number of the attempt at the rollout. A simulated *failure* depends on it; a sample does not."""


class TokenAlternative(NamedTuple):
    """A token that might have been sampled."""

    id: int
    logprob: float


Alternatives = tuple[tuple[TokenAlternative, ...], ...]
"""For each sampled token the likeliest ones at its place, the likeliest first; empty: nobody asked, or the engine tells
none."""


def entropy_of(told: Sequence[TokenAlternative]) -> float:
    """Entropy, in nats, of a distribution of which the likeliest tokens are known. All others count as one token, so it is a
    lower bound, and exact if all tokens are known."""
    shares = [exp(each.logprob) for each in told]
    rest = 1.0 - sum(shares)
    return -sum(share * log(share) for share in (*shares, rest) if share > 0.0)


class Generation(msgspec.Struct, frozen=True, gc=False):
    """The result of one call."""

    text: str
    sampled_ids: TokenIds = msgspec.field(default_factory=token_ids)
    logprobs: Floats = msgspec.field(default_factory=floats)
    versions: tuple[VersionRun, ...] = ()
    finish: FinishReason = FinishReason.STOP
    exact: bool = True
    """Whether `sampled_ids` are the ids that the engine sampled; a text-only engine gives none."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that the engine reports to have had in its cache."""
    reasoning_tokens: int = 0
    """Tokens of the completion that the engine reports as reasoning."""
    served: float | None = None
    """Seconds that the engine reports, its queue included; the rest of the call was transport. `None`: it reports none."""
    sampling: SamplingParams | None = None
    """The sampling settings that the engine got, if they differ from the requested ones; `None`: they do not."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls that an API returned beside the text; empty for a policy with a renderer."""
    reasoning: str = ""
    """Reasoning that an API returned beside the text; empty for a policy with a renderer."""
    checked: bool = False
    """Whether the policy has checked ids and log-probabilities; otherwise the session does."""
    alternatives: Alternatives = ()
    """Told to the client, and stored nowhere."""
    entropy: float | None = None
    """Entropy of the first token's distribution in nats, where `top_logprobs` asked and the engine knows it exactly."""

    @property
    def question_entropy(self) -> float | None:
        """Entropy of the first token's distribution, which depends on the prompt alone; `None`: the engine did not report it."""
        if self.entropy is not None or not self.alternatives:
            return self.entropy
        return entropy_of(self.alternatives[0])


class Parsed(msgspec.Struct, frozen=True):
    """The parts of a completion."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    """Texts that look like tool calls and cannot be parsed."""


class Renderer(Protocol):
    """Chat to token ids such that a longer conversation only appends ids; sampled ids are never encoded again."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end the assistant's turn; an engine stops at them and returns them as part of the sample."""
        ...

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> TokenIds:
        """The ids of a whole conversation, up to the start of the assistant's turn."""
        ...

    def extend(
        self,
        prompt: TokenIds,
        sampled: TokenIds,
        finish: FinishReason,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> TokenIds | None:
        """The ids behind `prompt + sampled`: the end of the assistant's turn if the sample lacks it, then `messages`, up to
        the start of the assistant's next turn. `None`: the model's format cannot continue here, and the conversation has to
        be rendered as a new sequence."""
        ...

    def parse(self, prompt: TokenIds, sampled: TokenIds, tools: Sequence[ToolSpec] = ()) -> Parsed:
        """Split a completion into content, reasoning and tool calls."""
        ...

    def decode(self, ids: TokenIds) -> str:
        """The text of sampled ids, without end-of-turn marks."""
        ...


class Policy(Protocol):
    """Generates tokens and knows its version."""

    @property
    def renderer(self) -> Renderer | None: ...

    @property
    def version(self) -> int:
        """Version of the weights that the next token would be sampled with."""
        ...

    @property
    def pressure(self) -> int:
        """Count of calls that the engine refused for load or did not answer in time, retried ones included."""
        ...

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation: ...

    async def close(self) -> None: ...


@runtime_checkable
class PerAgent(Protocol):
    """A policy that consists of several: each agent of a team may have its own."""

    def of_agent(self, agent: str) -> Policy:
        """The policy that serves this agent's calls."""
        ...


@runtime_checkable
class NamedPolicies(Protocol):
    """A policy that knows further ones by the names of the configuration's `policies`."""

    def named(self, name: str) -> Policy:
        """The policy of this name; raises a `ConfigError` if there is none."""
        ...


LONGEST_TOKEN = 128
"""Characters; no common vocabulary has a longer token."""


def longest_token(policy: Policy) -> int:
    """Most characters of one token of this policy, by its renderer's `longest_token`. A text with more characters than that
    for each free token cannot fit, which is known without tokenizing it."""
    return int(getattr(policy.renderer, "longest_token", LONGEST_TOKEN))


def takes_tools(policy: Policy) -> bool:
    """Whether a policy supports tools: its renderer writes and parses them, or the policy says so."""
    return policy.renderer is not None or bool(getattr(policy, "takes_tools", False))


def constrains_output(policy: Policy) -> bool:
    """Whether a policy enforces `Sampling.output`; it says so by an attribute of this name."""
    return bool(getattr(policy, "constrains_output", False))


class UpdateMode(StrEnum):
    """The treatment of running calls when new weights arrive."""

    DRAIN = "drain"
    """Running calls finish under the old weights; new calls wait."""
    ABORT_AND_RESUME = "abort_and_resume"
    """Running calls keep their tokens and sample the rest under the new weights; every token has its version."""
    RESTART_TURN = "restart_turn"
    """Running calls restart under the new weights; their tokens are counted and discarded."""


class Weights(msgspec.Struct, frozen=True):
    """New weights for a policy: a folder that an engine can load, an adapter for it, or tensors in this process."""

    version: int
    folder: Path | None = None
    """A folder in the format of transformers: `config.json` and safetensors."""
    tensors: Mapping[str, Any] | None = None
    """Torch tensors by name; they must not change while `update_weights` runs."""
    checksum: str | None = None
    """SHA-256 of the safetensors in the folder or adapter, which the policy checks."""
    adapter: Path | None = None
    """A folder with a LoRA adapter in peft's format, of the weights that the engine was started with."""

    @property
    def adapter_name(self) -> str:
        """Name of the adapter in an engine: another one for each version and content."""
        return f"rollwright-{self.version}-{(self.checksum or 'unchecked')[:12]}"


@runtime_checkable
class Updatable(Protocol):
    """A policy that accepts new weights while episodes run."""

    async def update_weights(self, weights: Weights, mode: UpdateMode) -> None:
        """Return when every further token is sampled by the new version. No call is dropped."""
        ...


class Capabilities(msgspec.Struct, frozen=True):
    """The capabilities that an engine reports."""

    engine: str
    """Name and version, as far as the engine reports them."""
    model: str = ""
    token_ids: bool = False
    """Whether it accepts prompt ids and returns sampled ids."""
    logprobs: bool = False
    update_modes: tuple[UpdateMode, ...] = ()
    missing: str = ""
    """Why its trajectories are not trainable, and the remedy; empty: they are."""

    @property
    def trainable(self) -> bool:
        return self.token_ids and self.logprobs


@runtime_checkable
class Probed(Protocol):
    """A policy whose engine reports its capabilities; a run asks once, before it starts."""

    async def probe(self) -> Capabilities: ...


MAX_LOGPROB = 1e-3
"""A log-probability may exceed 0 by rounding; a larger value is an error."""


def broken(made: Generation) -> str | None:
    """The defect in the numbers of a generation; `None`: none. Log-probabilities are 32-bit floats, so one out of range is
    infinite here."""
    if not made.exact:
        return None
    ids, logprobs = made.sampled_ids, made.logprobs
    if len(logprobs) != len(ids):
        return f"{len(ids)} token ids but {len(logprobs)} log-probabilities"
    if not ids:
        return None
    if min(ids) < 0:
        return f"{min(ids)} is not a token id"
    if not isfinite(sum(logprobs)):
        return "a log-probability that is not finite"
    if max(logprobs) > MAX_LOGPROB:
        return f"{max(logprobs):g} is not a log-probability: it is above 0"
    if sum(run.count for run in made.versions) != len(ids):
        return f"version stamps that do not cover its {len(ids)} tokens"
    return None


class EngineError(RollwrightError):
    """The engine gave no valid answer, and retries did not help."""

    exit_code = 1


class RateLimited(EngineError):
    """The engine refuses more load at the moment."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds that the engine asked to wait; `None`: it did not say."""
