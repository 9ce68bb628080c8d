"""One request to an engine that speaks token ids, and the piece of a completion that it answers.

What is true of a `Piece`: it has one finite log-probability for each id, every id is in the vocabulary, there
are no more of them than were asked for, and the prompt that the engine saw is the prompt that was sent, as far
as it says. Anything else is a `FormatError`, so that a broken answer is retried and never recorded.
"""

from collections.abc import Sequence

import msgspec

from rollwright.errors import FormatError
from rollwright.policies.base import MAX_LOGPROB, Sampling
from rollwright.trajectory import FinishReason, Floats, TokenIds, floats, token_ids

LARGEST_ID = (1 << 31) - 1
"""Ids are kept as signed 32-bit numbers."""

_LOWEST = -3.4028234663852886e38
"""Log-probabilities are kept as 32-bit floats: anything lower would become infinite."""

_TOKEN_BYTES = 2048
"""Of an answer, for each token that was asked for: its id, its log-probability, and its text up to three times, each
byte of it escaped. Engines send some 100 to 200."""

_PROMPT_BYTES = 16
"""Of an answer, for each id of the prompt, where the engine tells it back."""

_ANSWER_BYTES = 1 << 20
"""Of an answer beside its tokens: names, counts, an error in words."""


class Ask(msgspec.Struct, frozen=True):
    """What an engine is asked for."""

    ids: TokenIds
    """The whole prompt; after an abort, with the tokens sampled so far behind it."""
    sampling: Sampling
    max_tokens: int
    """What is left of the call's own limit."""
    stop_ids: tuple[int, ...]
    seed: int | None
    vocabulary_size: int | None
    """`None`: not known; ids are then only checked for being ids at all."""

    @property
    def max_answer(self) -> int:
        """Bytes that an answer to it may have. More is no answer to it, and nobody waits for its end."""
        return _ANSWER_BYTES + _TOKEN_BYTES * self.max_tokens + _PROMPT_BYTES * len(self.ids)


class Piece(msgspec.Struct, frozen=True):
    """What came back: a whole completion, or the part of one that was made before an abort."""

    ids: TokenIds
    logprobs: Floats
    finish: FinishReason
    label: str | None = None
    """Which weights made it, where the engine says so in its answer."""
    text: str | None = None
    """Only where the ids are missing: the completion is then not exact."""
    served: float | None = None
    """Seconds that the engine says it took; `None`: it does not say."""


def checked(
    ask: Ask,
    ids: Sequence[int] | None,
    logprobs: Sequence[float | None] | None,
    finish: FinishReason,
    *,
    seen: Sequence[int] | None = None,
    label: str | None = None,
) -> Piece:
    """The piece, when it is one."""
    if ids is None or logprobs is None:
        raise FormatError(f"no {'token ids' if ids is None else 'log-probabilities'} in it")
    if len(ids) != len(logprobs):
        raise FormatError(f"{len(ids)} token ids but {len(logprobs)} log-probabilities")
    if len(ids) > ask.max_tokens:
        raise FormatError(f"{len(ids)} tokens, but at most {ask.max_tokens} were asked for")
    if not ids and finish is not FinishReason.ABORT:
        raise FormatError("not a single token")
    largest = LARGEST_ID if ask.vocabulary_size is None else ask.vocabulary_size - 1
    for each in ids:
        if not 0 <= each <= largest:
            raise FormatError(f"token id {each} is not in the vocabulary, which ends at {largest}")
    if seen is not None and (len(seen) != len(ask.ids) or list(seen) != ask.ids.tolist()):
        raise FormatError(
            f"the engine saw another prompt: {len(seen)} ids instead of {len(ask.ids)}, or other ones"
        )
    return Piece(token_ids(ids), _logprobs(logprobs), finish, label)


def _logprobs(values: Sequence[float | None]) -> Floats:
    kept = []
    for place, value in enumerate(values):
        if value is None or not _LOWEST <= value <= MAX_LOGPROB:
            raise FormatError(f"{value} is not the log-probability of token {place}")
        kept.append(min(value, 0.0))
    return floats(kept)
