"""The policy's side of an episode: prompt in, sampled tokens out.

A policy that works in token ids has a `renderer`; the session gives it ids, and what comes back are the ids
that were sampled. A policy that only speaks text (a chat API) has none; it gets messages, and what it
returns is marked as not exact, so that nobody trains on it.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from rollwright.draws import KeyPart
from rollwright.errors import RollwrightError
from rollwright.trajectory import FinishReason, Floats, Message, TokenIds, VersionRun, floats, token_ids


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to sample. Log-probabilities always mean: of the distribution these settings give."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()


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


class Renderer(Protocol):
    """Chat to token ids, such that a longer conversation only ever adds ids."""

    def open(self, messages: Sequence[Message]) -> TokenIds:
        """A whole conversation, up to where the assistant's turn begins."""
        ...

    def extend(self, finish: FinishReason, messages: Sequence[Message]) -> TokenIds:
        """What follows sampled ids: the end of the assistant's turn where `finish` says the sample lacks
        it, then `messages`, up to where the assistant's next turn begins."""
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


class EngineError(RollwrightError):
    """The engine did not answer as it should, and retrying here did not help."""


class RateLimited(EngineError):
    """The engine refuses more load for now."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds the engine asked to wait; `None` when it did not say."""
