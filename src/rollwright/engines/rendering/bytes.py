"""A byte-level renderer: a lossless vocabulary for engines without a tokenizer.

Ids 0–255 are the bytes of UTF-8; five more mark roles and the end of a turn. Rendering a longer conversation only appends
ids, so the prompts of an episode extend each other by construction.
"""

import json
import re
import sys
from collections.abc import Sequence

import msgspec

from rollwright.engines.base import Parsed, ToolSpec
from rollwright.trajectory import FinishReason, Message, TokenIds, ToolCall, token_ids

SYSTEM, USER, ASSISTANT, TOOL, END = range(256, 261)
"""Role marks, and the end-of-turn token that a finished sample ends with."""

VOCABULARY_SIZE = 261

TOOLS_HEADING = "Tools:\n"
"""Begins the system message that lists the tools."""

_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}


_STEP = 1 << 20
"""Bytes converted at a time, which takes 2 ms: other threads wait for it."""

_WIDTH = token_ids().itemsize
_LOW = 0 if sys.byteorder == "little" else _WIDTH - 1
"""Offset of the low byte in an id."""

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)


class _Written(msgspec.Struct, frozen=True):
    """A tool call as a player writes it."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def written_call(name: str, arguments: object) -> str:
    """A tool call in the format that `BytesRenderer` parses."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def thought(text: str) -> str:
    """Reasoning in the format that `BytesRenderer` parses."""
    return f"<think>{text}</think>" if text else ""


class BytesRenderer:
    """The renderer of players and simulated engines. Tool calls are JSON between `<tool_call>` tags; reasoning comes first,
    between `<think>` tags."""

    stop_ids = (END,)

    longest_token = 1
    """A character is at least one byte, so at least one id."""

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> TokenIds:
        ids = token_ids()
        if tools:
            listed = "\n".join(msgspec.json.encode(each).decode() for each in tools)
            messages = [Message("system", TOOLS_HEADING + listed), *messages]
        for message in messages:
            ids.append(_ROLES[message.role])
            _append_text(ids, message.content)
            ids.append(END)
        ids.append(ASSISTANT)
        return ids

    def extend(
        self,
        prompt: TokenIds,
        sampled: TokenIds,
        finish: FinishReason,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> TokenIds:
        ended = bool(sampled) and sampled[-1] == END
        closing = token_ids() if ended else token_ids([END])
        return closing + self.open(messages)

    def parse(self, prompt: TokenIds, sampled: TokenIds, tools: Sequence[ToolSpec] = ()) -> Parsed:
        text = self.decode(sampled)
        found = _THOUGHT.match(text)
        reasoning = "" if found is None else found[1]
        text = text if found is None else text[found.end() :]
        if not tools:
            return Parsed(text, reasoning)
        calls, malformed = [], []
        for place, found in enumerate(_CALL.findall(text)):
            try:
                read = msgspec.json.decode(found, type=_Written)
            except msgspec.MsgspecError:
                malformed.append(found)
            else:
                # Unique in a sequence, because prompts only grow.
                call_id = f"call-{len(prompt)}-{place}"
                calls.append(ToolCall(call_id, read.name, bytes(read.arguments).decode()))
        return Parsed(_CALL.sub("", text), reasoning, tuple(calls), tuple(malformed))

    def read(self, ids: TokenIds) -> list[Message]:
        """The conversation that a prompt was rendered from, and sampled; tool calls stay in the text."""
        starts = [place for place, each in enumerate(ids) if SYSTEM <= each <= TOOL]
        names = {mark: role for role, mark in _ROLES.items()}
        parts = zip(starts, [*starts[1:], len(ids)], strict=True)
        said = [Message(names[ids[start]], self.decode(ids[start + 1 : end])) for start, end in parts]
        return said[:-1] if ids and ids[-1] == ASSISTANT else said

    def encode(self, text: str) -> TokenIds:
        """The ids of a whole assistant turn."""
        ids = token_ids()
        _append_text(ids, text)
        ids.append(END)
        return ids

    def decode(self, ids: TokenIds) -> str:
        return bytes(each for each in ids if each < SYSTEM).decode(errors="replace")


def _append_text(ids: TokenIds, text: str) -> None:
    """Append the ids of a text in blocks: byte by byte would take twenty times as long."""
    content = text.encode()
    for start in range(0, len(content), _STEP):
        part = content[start : start + _STEP]
        wide = bytearray(_WIDTH * len(part))
        wide[_LOW::_WIDTH] = part
        ids.frombytes(wide)
