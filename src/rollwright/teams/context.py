"""The shared context of a team: the agents' answers in the current step, as a list of fragments.

Always true: fragments keep the order in which they were committed. A prompt that would exceed its token limit loses whole
fragments, the oldest first; the system prompt and the question are no fragments, so they are never truncated. Tokens are
counted only where a prompt could exceed its limit, and once for each fragment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rollwright.agents.prompts import CHARACTERS_PER_TOKEN
from rollwright.engines.base import Renderer
from rollwright.trajectory import Message

FRAGMENT_BEGINS = 'The output of "'
"""Prefix of a fragment in a prompt; the agent's name follows."""

FORMAT_TOKENS = 64
"""Upper bound of the tokens that a chat template adds around two messages. A token has at least one byte, so a prompt
whose bytes plus this number are within the limit needs no counting."""


@dataclass(frozen=True)
class Fragment:
    """The answer of one agent."""

    agent: str
    text: str

    @property
    def shown(self) -> str:
        """The text that is inserted into prompts."""
        return f'\n{FRAGMENT_BEGINS}{self.agent}": {self.text}\n'


class FittedContext(NamedTuple):
    """The part of the context that fits into one prompt."""

    text: str
    cut: int = 0
    """Number of fragments that were left out."""
    cut_tokens: int = 0
    """Number of tokens in them."""


@dataclass
class ContextLog:
    """The context of one rollout during one step of the environment."""

    fragments: list[Fragment] = field(default_factory=list)
    _counted: dict[tuple[int, tuple[str, ...]], int] = field(default_factory=dict)
    """Token counts so far, by renderer and texts."""

    def add(self, agent: str, text: str) -> None:
        self.fragments.append(Fragment(agent, text))

    def fit(
        self,
        fixed: Sequence[Message],
        limit: int,
        renderer: Renderer | None,
        *,
        since: int = 0,
        without: str | None = None,
    ) -> FittedContext:
        """Selects the newest fragments that fit into a prompt of `limit` tokens beside the `fixed` messages.

        `since`: index of the first fragment to consider. `without`: agent whose fragments are left out.
        """
        shown = [each.shown for each in self.fragments[since:] if each.agent != without]
        if not shown:
            return FittedContext("")
        if sum(map(_bytes, shown)) + sum(_bytes(each.content) for each in fixed) + FORMAT_TOKENS <= limit:
            return FittedContext("".join(shown))
        # A fragment is counted as a message of its own, less the tokens that the chat template puts around it.
        empty = self._tokens([Message("user", "")], renderer)
        tokens = [self._tokens([Message("user", each)], renderer) - empty for each in shown]
        used = self._tokens(fixed, renderer) + sum(tokens)
        cut = 0
        while cut < len(tokens) and used > limit:
            used -= tokens[cut]
            cut += 1
        return FittedContext("".join(shown[cut:]), cut, sum(tokens[:cut]))

    def _tokens(self, messages: Sequence[Message], renderer: Renderer | None) -> int:
        """Number of prompt tokens of these messages; cached."""
        texts = tuple(message.content for message in messages)
        if renderer is None:
            return sum(-(-len(text) // CHARACTERS_PER_TOKEN) for text in texts)
        key = id(renderer), texts
        if key not in self._counted:
            self._counted[key] = len(renderer.open(messages))
        return self._counted[key]


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
