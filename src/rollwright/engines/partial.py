"""A completion while it is being sampled, and the pieces of it that an engine answers.

Always true of a `Piece`: it has one finite log-probability for each id, every id is in the vocabulary, there
are no more of them than were asked for, and the prompt that the engine saw is the prompt that was sent, as far
as it says. Anything else is a `FormatError`, so that a broken answer is retried and never recorded.
"""

from collections.abc import Sequence

import msgspec

from rollwright.engines.base import MAX_LOGPROB, Sampling
from rollwright.errors import FormatError
from rollwright.trajectory import FinishReason, Floats, TokenIds, VersionRun, floats, token_ids

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


class PartialCompletion(msgspec.Struct):
    """A completion under way: what was asked for, and the tokens at hand. The next request continues behind them."""

    prompt_ids: TokenIds
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Of the next request; `None`: the engine chooses."""
    vocabulary_size: int | None = None
    """`None`: not known; ids are then only checked for being ids at all."""
    ids: TokenIds = msgspec.field(default_factory=token_ids)
    """Sampled so far."""
    logprobs: Floats = msgspec.field(default_factory=floats)
    versions: list[VersionRun] = msgspec.field(default_factory=list)
    served: float | None = None
    """Seconds that the engine says it took for them; `None`: it does not say."""

    @property
    def input_ids(self) -> TokenIds:
        """What the engine is given: the prompt, and behind it the tokens at hand."""
        return self.prompt_ids + self.ids if self.ids else self.prompt_ids

    @property
    def max_tokens(self) -> int:
        """How many tokens may still be sampled."""
        return self.sampling.max_tokens - len(self.ids)

    @property
    def max_answer(self) -> int:
        """Bytes that an answer may have. A longer one is broken, and is not read to its end."""
        prompt_tokens = len(self.prompt_ids) + len(self.ids)
        return _ANSWER_BYTES + _TOKEN_BYTES * self.max_tokens + _PROMPT_BYTES * prompt_tokens

    def add(self, piece: "Piece", version: int) -> None:
        """Appends the tokens of an answer, made by the weights of this version."""
        if piece.served is not None:
            self.served = (self.served or 0.0) + piece.served
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        count = len(piece.ids)
        if self.versions and self.versions[-1].version == version:
            count += self.versions.pop().count
        if count:
            self.versions.append(VersionRun(version, count))

    def discard(self) -> int:
        """Throws the tokens at hand away; returns how many there were."""
        count = len(self.ids)
        self.ids, self.logprobs, self.versions, self.served = token_ids(), floats(), [], None
        return count


class Piece(msgspec.Struct, frozen=True):
    """One answer of an engine: a whole completion, or the part of one that was sampled before an abort."""

    ids: TokenIds
    logprobs: Floats
    finish: FinishReason
    label: str | None = None
    """Which weights made it, where the engine says so in its answer."""
    text: str | None = None
    """Only where the ids are missing: the completion is then not exact."""
    served: float | None = None
    """Seconds that the engine says it took; `None`: it does not say."""


def check_piece(
    partial: PartialCompletion,
    ids: Sequence[int] | None,
    logprobs: Sequence[float | None] | None,
    finish: FinishReason,
    *,
    seen: Sequence[int] | None = None,
    label: str | None = None,
) -> Piece:
    """Builds the piece; raises `FormatError` for an answer that is not whole, or not to this request."""
    if ids is None or logprobs is None:
        raise FormatError(f"no {'token ids' if ids is None else 'log-probabilities'} in it")
    if len(ids) != len(logprobs):
        raise FormatError(f"{len(ids)} token ids but {len(logprobs)} log-probabilities")
    if len(ids) > partial.max_tokens:
        raise FormatError(f"{len(ids)} tokens, but at most {partial.max_tokens} were asked for")
    if not ids and finish is not FinishReason.ABORT:
        raise FormatError("not a single token")
    largest = LARGEST_ID if partial.vocabulary_size is None else partial.vocabulary_size - 1
    for each in ids:
        if not 0 <= each <= largest:
            raise FormatError(f"token id {each} is not in the vocabulary, which ends at {largest}")
    if seen is not None and list(seen) != (sent := partial.input_ids.tolist()):
        raise FormatError(
            f"the engine saw another prompt: {len(seen)} ids instead of {len(sent)}, or other ones"
        )
    return Piece(token_ids(ids), _logprobs(logprobs), finish, label)


def _logprobs(values: Sequence[float | None]) -> Floats:
    kept = []
    for place, value in enumerate(values):
        if value is None or not _LOWEST <= value <= MAX_LOGPROB:
            raise FormatError(f"{value} is not the log-probability of token {place}")
        kept.append(min(value, 0.0))
    return floats(kept)
