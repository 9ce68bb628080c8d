"""The turn journal: durable turns of an attempt, so that the next attempt need not sample them again.

Always true: a turn is in the journal before its action reaches the environment. So at most the one generation in flight
is lost with a worker. A later attempt makes the same calls again, because the environment is reset with the same seed and
receives the same actions; a call that is in the journal is answered from it, without the engine. If a prompt or an
environment's answer differs from the record, `ReplayDiffers` is raised and the journal is discarded.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Protocol

import msgspec

from rollwright.trajectory import Message, Outcome, SamplingParams, Turn
from rollwright.trajectory.codec import Codec


class JournalEntry(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """One generation, with the question and the environment's last answer before it."""

    place: int
    """Name of the call's node in the call tree."""
    turn: Turn
    """The turn without its outcome, which was not known yet."""
    question: int
    """Digest of the messages that the prompt added."""
    before: Outcome | None = None
    """The environment's answer to the previous turn."""
    sampling: SamplingParams | None = None
    """Sampling parameters of its tokens; the next attempt may have other ones. `None`: written by a release that did
    not record them."""

    def to_bytes(self) -> bytes:
        return _CODEC.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> "JournalEntry":
        return _CODEC.decode(data)


_CODEC = Codec(JournalEntry, magic=b"RWJ", version=3, compress=False, unchecked=2)


class AttemptInterrupted(Exception):
    """Ends an attempt without being a failure of it."""


class ReplayDiffers(AttemptInterrupted):
    """The episode differs from the journal."""


class Superseded(AttemptInterrupted):
    """The attempt does not hold its rollout any more."""


class Journal(Protocol):
    """Records the turns of a session, and provides those of earlier attempts."""

    recorded: dict[int, JournalEntry]
    """Entries of earlier attempts that were not replayed yet, by the name of their node."""

    async def append(self, entry: JournalEntry) -> None:
        """Returns when the entry is durable; raises `Superseded` if the attempt lost its rollout."""
        ...


def name_of(messages: Sequence[Message]) -> int:
    """Digest of the messages that a prompt added, with which a replay compares its own."""
    text = "\x1f".join([f"{message.role}\x1e{message.content}{_more(message)}" for message in messages])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _more(message: Message) -> str:
    if message.tool_calls or message.tool_call_id or message.reasoning or message.name:
        calls = [f"{call.id}\x1d{call.name}\x1d{call.arguments}" for call in message.tool_calls]
        return "\x1e".join(["", message.reasoning, str(message.tool_call_id), str(message.name), *calls])
    return ""


def replay(
    journal: Journal, node: int, asked: int, before: Outcome | None, own: SamplingParams
) -> Turn | None:
    """Returns the recorded turn at this node, or `None`; raises `ReplayDiffers` if the question or the environment's
    last answer differs. `own`: the sampling settings of the asking attempt, which turns that share them do not repeat."""
    entry = journal.recorded.pop(node, None)
    if entry is None:
        return None
    if entry.before != before:
        raise ReplayDiffers(f"the environment answered the turn before turn {entry.turn.id} differently")
    if entry.question != asked:
        raise ReplayDiffers(f"the prompt of turn {entry.turn.id} differs")
    drawn = entry.sampling
    if drawn is None or drawn == (entry.turn.sampling or own):
        return entry.turn
    return msgspec.structs.replace(entry.turn, sampling=drawn)


def entries(encoded: Iterable[bytes]) -> dict[int, JournalEntry]:
    """Decodes entries, by the name of their node. Of two entries at one node (after an attempt
    cleared its journal and restarted), the later one counts."""
    read = (JournalEntry.from_bytes(each) for each in encoded)
    return {entry.place: entry for entry in read}
