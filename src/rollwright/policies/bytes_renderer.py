"""A byte-level renderer: a real, lossless vocabulary for engines that have no tokenizer of their own.

Ids 0–255 are the bytes of UTF-8; five more mark roles and the end of a turn. Joining ids and rendering a
longer conversation commute, so a chain's prompts extend each other by construction.
"""

from collections.abc import Sequence

from rollwright.policies.base import Parsed, ToolSpec
from rollwright.trajectory import FinishReason, Message, TokenIds, token_ids

SYSTEM, USER, ASSISTANT, TOOL, END = range(256, 261)
"""Role marks, and the end-of-turn token that a finished sample ends with."""

VOCABULARY_SIZE = 261

_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}


class BytesRenderer:
    """Knows no tools: it is for players and simulated engines."""

    stop_ids = (END,)

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> TokenIds:
        ids = token_ids()
        for message in messages:
            ids.append(_ROLES[message.role])
            ids.extend(message.content.encode())
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
        return Parsed(self.decode(sampled))

    def encode(self, text: str) -> TokenIds:
        """A whole assistant turn."""
        return token_ids([*text.encode(), END])

    def decode(self, ids: TokenIds) -> str:
        return bytes(each for each in ids if each < SYSTEM).decode(errors="replace")
