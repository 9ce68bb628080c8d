"""The policy's side of an episode: prompt in, sampled tokens out.

A policy that works in token ids has a `renderer`; the session gives it ids, and what comes back are the ids
that were sampled. A policy that only speaks text (a chat API) has none; it gets messages, and what it
returns is marked as not exact, so that nobody trains on it.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

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


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to sample. Log-probabilities always mean: of the distribution these settings give."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()

    def params(self) -> SamplingParams:
        """What of it shapes the distribution, as a turn records it."""
        if self.top_p != 1:
            return SamplingParams(self.temperature, self.top_p)
        # A default that is left out here takes no bytes in the journal, where every turn has a record.
        return SamplingParams() if self.temperature == 1 else SamplingParams(self.temperature)


class ToolSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool as the model is told of it."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments."""


@runtime_checkable
class Playable(Protocol):
    """An environment that can say what may be done now; what the built-in players look at."""

    def actions(self) -> Sequence[str]:
        """The actions that exist now, as the model would name them. Empty: no finite list exists."""
        ...

    def best_action(self) -> str | None:
        """The next action of a shortest solution; `None` when there is none or it is not known."""
        ...

    def answer(self, action: str) -> str:
        """A completion that names `action` in the format the prompt asks for."""
        ...


class NoActions:
    """The `Playable` of a rollout without an environment: players without a model find nothing to choose, so an agent of
    one's own can be tried out against a simulated engine, which then says filler text."""

    def actions(self) -> list[str]:
        return []

    def best_action(self) -> str | None:
        return None

    def answer(self, action: str) -> str:
        return action


NO_ACTIONS: Playable = NoActions()


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """One call's input."""

    episode: str
    """Rollout id: engines route by it, so that an episode's calls meet the same prefix cache."""
    key: tuple[KeyPart, ...]
    """What every random draw for this call is keyed by."""
    messages: Sequence[Message]
    """The conversation, for policies that speak text."""
    ids: TokenIds | None = None
    """The whole prompt in token ids; `None` for a policy without a renderer."""
    env: Playable | None = None
    """For the built-in players, which look at the board instead of reading the prompt."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools the model may call, for policies that speak text; `ids` have them already."""
    attempt: int = 1
    """Which attempt at the rollout this is. A simulated *failure* depends on it; a sample does not."""


class Generation(msgspec.Struct, frozen=True, gc=False):
    """What a policy made of a prompt."""

    text: str
    sampled_ids: TokenIds = msgspec.field(default_factory=token_ids)
    logprobs: Floats = msgspec.field(default_factory=floats)
    versions: tuple[VersionRun, ...] = ()
    finish: FinishReason = FinishReason.STOP
    exact: bool = True
    """Whether `sampled_ids` are the ids the engine sampled; a text-only engine gives none."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    served: float | None = None
    """Seconds that the engine says it took, its line included; the rest of the call was the way. `None`: it does not
    say."""
    sampling: SamplingParams | None = None
    """What the engine was told, where that is not what was asked for; `None`: it is."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls that an API told of apart from the text; a policy with a renderer has none here."""
    checked: bool = False
    """Whether its policy has checked ids and log-probabilities already; else the session does."""


class Parsed(msgspec.Struct, frozen=True):
    """A completion taken apart."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    """What looks like a tool call and cannot be read, as text."""


class Renderer(Protocol):
    """Chat to token ids, such that a longer conversation only ever adds ids. Sampled ids are never made anew."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end the assistant's turn; an engine stops at them, and they are part of the sample."""
        ...

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> TokenIds:
        """A whole conversation, up to where the assistant's turn begins."""
        ...

    def extend(
        self,
        prompt: TokenIds,
        sampled: TokenIds,
        finish: FinishReason,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> TokenIds | None:
        """What follows `prompt + sampled`: the end of the assistant's turn where the sample lacks it, then
        `messages`, up to where the assistant's next turn begins. `None`: this model's format cannot continue
        here, and the conversation has to be opened anew."""
        ...

    def parse(self, prompt: TokenIds, sampled: TokenIds, tools: Sequence[ToolSpec] = ()) -> Parsed:
        """Takes a completion apart."""
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
        """Of the weights that the next token would be sampled with."""
        ...

    @property
    def pressure(self) -> int:
        """How often so far the engine has refused load or not answered in time; retried calls count too."""
        ...

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation: ...

    async def close(self) -> None: ...


@runtime_checkable
class PerAgent(Protocol):
    """A policy that is several: the agents of a team may each have their own."""

    def of_agent(self, agent: str) -> Policy:
        """Who answers this agent's calls."""
        ...


LONGEST_TOKEN = 128
"""Characters: no usual vocabulary has a longer token."""


def longest_token(policy: Policy) -> int:
    """Most characters that one token of this policy stands for, by its renderer's `longest_token`: a text of more than
    that for each token that there is room for cannot fit, and need not be taken apart to find out."""
    return int(getattr(policy.renderer, "longest_token", LONGEST_TOKEN))


def takes_tools(policy: Policy) -> bool:
    """Whether a policy's model can be told of tools, and its calls read: from ids, or because the policy says so."""
    return policy.renderer is not None or bool(getattr(policy, "takes_tools", False))


class UpdateMode(StrEnum):
    """What happens to the calls that are being served when new weights arrive."""

    DRAIN = "drain"
    """They finish under the old weights; new calls wait meanwhile."""
    ABORT_AND_RESUME = "abort_and_resume"
    """Their tokens so far are kept, the rest is sampled under the new weights; every token knows which made it."""
    RESTART_TURN = "restart_turn"
    """They begin anew under the new weights; the tokens they had are counted and thrown away."""


class Weights(msgspec.Struct, frozen=True):
    """New weights for a policy: a folder that an engine can load, or tensors in this process."""

    version: int
    folder: Path | None = None
    """As transformers saves a model: `config.json` and safetensors."""
    tensors: Mapping[str, Any] | None = None
    """Names and torch tensors, not changed by anybody while `update_weights` runs."""
    checksum: str | None = None
    """SHA-256 of the folder's safetensors; a policy that reads the folder checks it."""


@runtime_checkable
class Updatable(Protocol):
    """A policy that takes new weights while episodes run."""

    async def update_weights(self, weights: Weights, mode: UpdateMode) -> None:
        """Returns when every token sampled from now on is of the new version. No call is dropped by it."""
        ...


class Capabilities(msgspec.Struct, frozen=True):
    """What an engine can do, found out by asking it."""

    engine: str
    """Name and version, as far as it says."""
    model: str = ""
    token_ids: bool = False
    """Takes prompt ids and returns sampled ids."""
    logprobs: bool = False
    update_modes: tuple[UpdateMode, ...] = ()
    missing: str = ""
    """Why its trajectories are not trainable, and what to use instead; empty: they are."""

    @property
    def trainable(self) -> bool:
        return self.token_ids and self.logprobs


@runtime_checkable
class Probed(Protocol):
    """A policy whose engine can be asked what it can do; a run asks once, before it starts."""

    async def probe(self) -> Capabilities: ...


MAX_LOGPROB = 1e-3
"""A log-probability may be above 0 by rounding; more than that is no log-probability."""


def broken(made: Generation) -> str | None:
    """What is wrong with the numbers of a generation; `None`: nothing. Kept as 32-bit floats, a log-probability that
    does not fit into one is infinite here."""
    if not made.exact:
        return None
    ids, logprobs = made.sampled_ids, made.logprobs
    if len(logprobs) != len(ids):
        return f"{len(ids)} token ids but {len(logprobs)} log-probabilities"
    if not ids:
        return None
    if min(ids) < 0:
        return f"{min(ids)} is no token id"
    if not isfinite(sum(logprobs)):
        return "a log-probability that is not finite"
    if max(logprobs) > MAX_LOGPROB:
        return f"{max(logprobs):g} is no log-probability: it is above 0"
    if sum(run.count for run in made.versions) != len(ids):
        return f"version stamps that do not cover its {len(ids)} tokens"
    return None


class EngineError(RollwrightError):
    """The engine did not answer as it should, and retrying here did not help."""

    exit_code = 1


class RateLimited(EngineError):
    """The engine refuses more load for now."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds the engine asked to wait; `None` when it did not say."""
