"""The team's context: what its agents have said in this step, as fragments.

Always true: fragments stand in the order in which they were committed; they are joined once for each prompt; what does
not fit is cut by whole fragments, the oldest first. The system prompt and the question are not fragments, so nothing
here can cut them. Tokens are counted only where a prompt could be too long, and each fragment's once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rollwright.engines.base import Renderer
from rollwright.trajectory import Message

CHARACTERS_PER_TOKEN = 4
"""What a token of English is worth; only for engines that speak text, whose tokens nobody can count."""

FRAGMENT_BEGINS = 'The output of "'
"""What stands before the name of the agent that said it."""

FORMAT_TOKENS = 64
"""More than a chat format adds around two messages. No token is shorter than a byte, so a prompt whose bytes and these
are within the limit needs no counting."""


@dataclass(frozen=True)
class Fragment:
    """What one agent said."""

    agent: str
    text: str

    @property
    def shown(self) -> str:
        """As it stands in a prompt."""
        return f'\n{FRAGMENT_BEGINS}{self.agent}": {self.text}\n'


class Fitted(NamedTuple):
    """The context of one prompt."""

    text: str
    cut: int = 0
    """Fragments that were left out."""
    cut_tokens: int = 0


@dataclass
class ContextLog:
    """One sample's, for one step of the environment."""

    fragments: list[Fragment] = field(default_factory=list)
    _counted: dict[tuple[int, tuple[str, ...]], int] = field(default_factory=dict)
    """Tokens of what was counted already, by renderer and texts."""

    def add(self, agent: str, text: str) -> None:
        self.fragments.append(Fragment(agent, text))

    def fitted(
        self,
        fixed: Sequence[Message],
        limit: int,
        renderer: Renderer | None,
        *,
        since: int = 0,
        without: str | None = None,
    ) -> Fitted:
        """The fragments that fit a prompt of `limit` tokens beside the `fixed` messages: those from number `since` on,
        less those of the agent `without`."""
        shown = [each.shown for each in self.fragments[since:] if each.agent != without]
        if not shown:
            return Fitted("")
        if sum(map(_bytes, shown)) + sum(_bytes(each.content) for each in fixed) + FORMAT_TOKENS <= limit:
            return Fitted("".join(shown))
        empty = self._tokens([Message("user", "")], renderer)
        tokens = [self._tokens([Message("user", each)], renderer) - empty for each in shown]
        used = self._tokens(fixed, renderer) + sum(tokens)
        cut = 0
        while cut < len(tokens) and used > limit:
            used -= tokens[cut]
            cut += 1
        return Fitted("".join(shown[cut:]), cut, sum(tokens[:cut]))

    def _tokens(self, messages: Sequence[Message], renderer: Renderer | None) -> int:
        """Of a prompt of these messages; each is counted once."""
        texts = tuple(message.content for message in messages)
        if renderer is None:
            return sum(-(-len(text) // CHARACTERS_PER_TOKEN) for text in texts)
        key = id(renderer), texts
        if key not in self._counted:
            self._counted[key] = len(renderer.open(messages))
        return self._counted[key]


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
