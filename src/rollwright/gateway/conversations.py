"""Finds the recorded turn that an incoming conversation continues.

Always true: a conversation continues a turn only if everything up to its last assistant message equals the prompt of that
turn, with the same tools, followed by the answer that was sent to the client. Then only the new messages are rendered, and
the answer is represented by its sampled ids. Tool arguments are compared as JSON values, because clients re-serialise them;
assistant text is compared without surrounding white space; reasoning is not compared, because clients omit it.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any

import msgspec

from rollwright.engines.base import ToolSpec, encoded_tools
from rollwright.trajectory import Message

Key = tuple[Any, ...]
"""Comparison key of a message; equal keys mean equal messages."""

_encode = msgspec.json.Encoder(order="deterministic").encode


class RewriteCause(StrEnum):
    """What a client changed, so that its conversation continues no recorded turn."""

    TOOLS = "tools"
    """The same messages with other tools."""
    SYSTEM = "system"
    """Another system prompt."""
    DROPPED = "dropped"
    """Some messages are missing, and the others are as they were: the client shortened its history."""
    ANSWER = "answer"
    """An answer differs from what was sent, or was never given."""
    MESSAGE = "message"
    """A message of the user or a tool differs, or was put in."""


_COMPARED = 16
"""Latest turns whose conversations are searched for messages that were dropped."""


class ConversationNode:
    """A conversation up to one of its messages."""

    __slots__ = ("message", "next", "parent", "turns")

    def __init__(self, parent: "ConversationNode | None" = None, message: Message | None = None) -> None:
        self.parent = parent
        self.message = message
        self.next: dict[Key, ConversationNode] = {}
        self.turns: list[tuple[int, tuple[str, ...]]] = []
        """Turns that ended here, with the ids of their tool calls."""


class Conversations:
    """All conversations of one rollout, as a tree of messages."""

    def __init__(self) -> None:
        self._roots: dict[bytes, ConversationNode] = {}
        """Root nodes by the offered tools, which are part of the prompt."""
        self._ends: dict[int, ConversationNode] = {}
        """End node of each turn."""

    def __len__(self) -> int:
        return len(self._ends)

    def find(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[int, int] | None:
        """The turn that `messages` continue, and the number of messages that it covers; `None`: a new conversation."""
        covered = answered(messages)
        node = self._roots.get(encoded_tools(tools)) if covered else None
        for message in messages[:covered]:
            if node is None:
                return None
            node = node.next.get(_key(message))
        if node is None or not node.turns:
            return None
        ids = tuple(call.id for call in messages[covered - 1].tool_calls)
        same = [turn for turn, calls in node.turns if calls == ids]
        return (same or [node.turns[-1][0]])[-1], covered

    def explain(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> RewriteCause:
        """What was changed in a conversation that `find` does not know."""
        keys = [_key(message) for message in messages[: answered(messages)]]
        own = self._roots.get(encoded_tools(tools))
        if any(_walk(root, keys) == len(keys) for root in self._roots.values() if root is not own):
            return RewriteCause.TOOLS
        known = max((_walk(root, keys) for root in self._roots.values()), default=0)
        paths = [[_key(each) for each in self.until(turn) or ()] for turn in sorted(self._ends)[-_COMPARED:]]
        if any(_is_part(keys, path) for path in paths):
            return RewriteCause.DROPPED
        if known == 0 and any(path[:1] != keys[:1] and _has_system(path, keys) for path in paths):
            return RewriteCause.SYSTEM
        if known == len(keys) or keys[known][0] == "assistant":
            return RewriteCause.ANSWER
        return RewriteCause.MESSAGE

    def add(
        self,
        messages: Iterable[Message],
        tools: Sequence[ToolSpec],
        answer: Message,
        turn_id: int,
        *,
        continues: int | None = None,
    ) -> None:
        """Adds the conversation that turn `turn_id` ended: `messages`, then `answer`. With `continues`, the messages are
        those behind that turn, which `find` has found."""
        if continues is None:
            node = self._roots.setdefault(encoded_tools(tools), ConversationNode())
        else:
            node = self._ends[continues]
        for message in (*messages, answer):
            key = _key(message)
            found = node.next.get(key)
            if found is None:
                found = node.next[key] = ConversationNode(node, message)
            node = found
        node.turns.append((turn_id, tuple(call.id for call in answer.tool_calls)))
        self._ends[turn_id] = node

    def until(self, turn_id: int) -> list[Message] | None:
        """The conversation that turn `turn_id` ended, including its answer; `None`: there is no such turn."""
        node = self._ends.get(turn_id)
        if node is None:
            return None
        messages = []
        while node is not None and node.message is not None:
            messages.append(node.message)
            node = node.parent
        return messages[::-1]


def _walk(node: ConversationNode, keys: Sequence[Key]) -> int:
    """Number of messages from the start that are known below `node`."""
    found: ConversationNode | None = node
    for place, key in enumerate(keys):
        found = None if found is None else found.next.get(key)
        if found is None:
            return place
    return len(keys)


def _is_part(keys: Sequence[Key], path: Sequence[Key]) -> bool:
    """Whether `keys` stand in `path` in this order, with others between them."""
    left = iter(path)
    return all(key in left for key in keys)


def _has_system(path: Sequence[Key], keys: Sequence[Key]) -> bool:
    return any(each[:1] and each[0][0] == "system" for each in (path, keys))


def answered(messages: Sequence[Message]) -> int:
    """Number of messages up to and including the last assistant message."""
    for place in range(len(messages), 0, -1):
        if messages[place - 1].role == "assistant":
            return place
    return 0


def _key(message: Message) -> Key:
    if message.role != "assistant":
        return (message.role, message.content, message.tool_call_id)
    calls = tuple((call.name, _arguments(call.arguments)) for call in message.tool_calls)
    return ("assistant", message.content.strip(), calls)


@lru_cache(maxsize=4096)  # a call stands in every later request of its conversation
def _arguments(text: str) -> bytes | str:
    try:
        return _encode(msgspec.json.decode(text or "{}"))
    except (msgspec.DecodeError, RecursionError):
        return text
