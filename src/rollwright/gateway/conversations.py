"""Finds the recorded turn that an incoming conversation continues.

Always true: a conversation goes on from a turn only if everything up to its last assistant message is what that turn
was asked, with the same tools, followed by the answer as the client was told it. Then only what is new counts, and
the sampled ids stand for the answer. Tool arguments are compared as JSON values, because clients write them anew, and
an assistant's text without the white space around it; thoughts are not compared, because clients leave them out.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rollwright.engines.base import ToolSpec
from rollwright.trajectory import Message

Key = tuple[Any, ...]
"""Two messages with equal keys are the same."""

_encode = msgspec.json.Encoder(order="deterministic").encode


class ConversationNode:
    """A conversation up to one of its messages."""

    __slots__ = ("message", "next", "parent", "turns")

    def __init__(self, parent: "ConversationNode | None" = None, message: Message | None = None) -> None:
        self.parent = parent
        self.message = message
        self.next: dict[Key, ConversationNode] = {}
        self.turns: list[tuple[int, tuple[str, ...]]] = []
        """The turns that ended here, with the ids of the calls they made."""


class Conversations:
    """All conversations of one rollout, as a tree of messages."""

    def __init__(self) -> None:
        self._roots: dict[bytes, ConversationNode] = {}
        """By the tools that the model was told of: they are part of the prompt."""
        self._ends: dict[int, ConversationNode] = {}
        """Where each turn ended."""

    def __len__(self) -> int:
        return len(self._ends)

    def find(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[int, int] | None:
        """The turn that `messages` go on from, and how many of them it covers; `None`: they begin anew."""
        covered = answered(messages)
        node = self._roots.get(_encode(tools)) if covered else None
        for message in messages[:covered]:
            if node is None:
                return None
            node = node.next.get(_key(message))
        if node is None or not node.turns:
            return None
        ids = tuple(call.id for call in messages[covered - 1].tool_calls)
        same = [turn for turn, calls in node.turns if calls == ids]
        return (same or [node.turns[-1][0]])[-1], covered

    def add(
        self, messages: Iterable[Message], tools: Sequence[ToolSpec], answer: Message, turn_id: int
    ) -> None:
        """From now on, `messages` and then `answer` are the conversation that turn `turn_id` ended."""
        node = self._roots.setdefault(_encode(tools), ConversationNode())
        for message in (*messages, answer):
            key = _key(message)
            found = node.next.get(key)
            if found is None:
                found = node.next[key] = ConversationNode(node, message)
            node = found
        node.turns.append((turn_id, tuple(call.id for call in answer.tool_calls)))
        self._ends[turn_id] = node

    def until(self, turn_id: int) -> list[Message] | None:
        """The conversation that turn `turn_id` ended, its answer included; `None`: there is no such turn."""
        node = self._ends.get(turn_id)
        if node is None:
            return None
        messages = []
        while node is not None and node.message is not None:
            messages.append(node.message)
            node = node.parent
        return messages[::-1]


def answered(messages: Sequence[Message]) -> int:
    """How many messages stand up to and including the last one of the assistant."""
    for place in range(len(messages), 0, -1):
        if messages[place - 1].role == "assistant":
            return place
    return 0


def _key(message: Message) -> Key:
    if message.role != "assistant":
        return (message.role, message.content, message.tool_call_id)
    calls = tuple((call.name, _arguments(call.arguments)) for call in message.tool_calls)
    return ("assistant", message.content.strip(), calls)


def _arguments(text: str) -> bytes | str:
    try:
        return _encode(msgspec.json.decode(text or "{}"))
    except (msgspec.DecodeError, RecursionError):
        return text
