"""Tokens that calls of a model have used, and who used them.

Always true: cached tokens are part of the prompt's, reasoning tokens part of the completion's, as the APIs count them.
Calls outside of turns (a judge's, an opponent's) are noted with the attempt in whose task they are made: `collect_calls` opens
the list, `note_call` adds to it, in this task or in tasks that it started.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec


class TokenUsage(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """Calls and tokens; adds up."""

    calls: int = 0
    prompt: int = 0
    cached: int = 0
    """Part of `prompt` that the engine had in its cache."""
    completion: int = 0
    reasoning: int = 0
    """Part of `completion` that was spent on reasoning."""

    def __add__(self, other: "TokenUsage") -> "TokenUsage":
        return TokenUsage(
            self.calls + other.calls,
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.completion + other.completion,
            self.reasoning + other.reasoning,
        )

    @property
    def tokens(self) -> int:
        return self.prompt + self.completion


class OutsideCall(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """Calls for one attempt that are no turns of its trajectory: of a judge, or of an agent beside the episode."""

    judge: str
    """Name of the reward whose judge was asked; empty: an agent asked."""
    model: str
    """Name of the model; empty: that of the policy, the agent or the run."""
    usage: TokenUsage
    agent: str = ""
    """The agent that asked; empty: a judge did."""
    policy: str = ""
    """Name, among `policies`, of the policy that answered; empty: the agent's own."""


_CALLS: ContextVar[list[OutsideCall] | None] = ContextVar("rollwright_outside_calls", default=None)
_JUDGE: ContextVar[str] = ContextVar("rollwright_judge", default="judge")


class collect_calls:
    """`with collect_calls() as calls:` lists the calls that are noted inside. Every attempt enters one, so it is no generator,
    through which a cancellation takes several times as long."""

    __slots__ = ("_token",)

    def __enter__(self) -> list[OutsideCall]:
        calls: list[OutsideCall] = []
        self._token = _CALLS.set(calls)
        return calls

    def __exit__(self, *raised: object) -> None:
        _CALLS.reset(self._token)


@contextmanager
def calling_as(judge: str) -> Iterator[None]:
    """Notes calls inside under this reward's name."""
    token = _JUDGE.set(judge)
    try:
        yield
    finally:
        _JUDGE.reset(token)


def note_call(model: str, usage: TokenUsage, *, agent: str = "", policy: str = "") -> None:
    """Notes one call, of an agent or else of the current judge; without an open list it is counted nowhere."""
    if (calls := _CALLS.get()) is not None:
        calls.append(OutsideCall("" if agent else _JUDGE.get(), model, usage, agent, policy))


def sum_calls(calls: Iterable[OutsideCall]) -> tuple[OutsideCall, ...]:
    """One entry for each caller and model, in their order."""
    sums: dict[tuple[str, str, str, str], TokenUsage] = {}
    for each in calls:
        key = each.judge, each.model, each.agent, each.policy
        sums[key] = sums.get(key, TokenUsage()) + each.usage
    return tuple(
        OutsideCall(judge, model, usage, agent, policy)
        for (judge, model, agent, policy), usage in sums.items()
    )
