"""A completion while it is being sampled, and the pieces that engines return.

Always true of a `Piece`: it has one finite log-probability for each id, every id is in the vocabulary, there are no more ids
than requested, and the prompt that the engine reports is the prompt that was sent. Any other response is a `FormatError`, so
it is retried and never recorded.
"""

from collections.abc import Iterable, Sequence

import msgspec

from rollwright.engines.base import MAX_LOGPROB, Alternatives, Sampling, TokenAlternative
from rollwright.errors import FormatError
from rollwright.trajectory import FinishReason, Floats, TokenIds, VersionRun, floats, token_ids

LARGEST_ID = (1 << 31) - 1
"""Ids are stored as signed 32-bit numbers."""

_LOWEST = -3.4028234663852886e38
"""Log-probabilities are stored as 32-bit floats: a lower one would become infinite."""

_TOKEN_BYTES = 2048
"""Bytes of a response for each requested token: its id, its log-probability, and its text up to three times with every byte
escaped. Engines send 100 to 200."""

_PROMPT_BYTES = 16
"""Bytes of a response for each id of the prompt, which some engines return."""

_ANSWER_BYTES = 1 << 20
"""Bytes of a response beside its tokens: names, counts, an error message."""


class PartialCompletion(msgspec.Struct):
    """A completion under way: the request and the tokens sampled so far. The next request continues behind them."""

    prompt_ids: TokenIds
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Seed of the next request; `None`: the engine chooses."""
    vocabulary_size: int | None = None
    """`None`: unknown; then ids are only checked to be non-negative 32-bit numbers."""
    ids: TokenIds = msgspec.field(default_factory=token_ids)
    """Ids sampled so far."""
    logprobs: Floats = msgspec.field(default_factory=floats)
    versions: list[VersionRun] = msgspec.field(default_factory=list)
    served: float | None = None
    """Seconds that the engine reports for them; `None`: it reports none."""
    alternatives: list[tuple[TokenAlternative, ...]] = msgspec.field(default_factory=list)
    """Of each id, if they were asked for."""

    @property
    def input_ids(self) -> TokenIds:
        """The ids that the engine gets: the prompt and the tokens sampled so far."""
        return self.prompt_ids + self.ids if self.ids else self.prompt_ids

    @property
    def max_tokens(self) -> int:
        """Number of tokens that may still be sampled."""
        return self.sampling.max_tokens - len(self.ids)

    @property
    def max_answer(self) -> int:
        """Most bytes of a response. A longer one is broken and is not read to its end."""
        prompt_tokens = len(self.prompt_ids) + len(self.ids)
        return _ANSWER_BYTES + _TOKEN_BYTES * self.max_tokens + _PROMPT_BYTES * prompt_tokens

    def add(self, piece: "Piece", version: int) -> None:
        """Append the tokens of a response, made by the weights of this version."""
        if piece.served is not None:
            self.served = (self.served or 0.0) + piece.served
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.alternatives += piece.alternatives
        count = len(piece.ids)
        if self.versions and self.versions[-1].version == version:
            count += self.versions.pop().count
        if count:
            self.versions.append(VersionRun(version, count))

    def discard(self) -> int:
        """Discard the tokens sampled so far; return their number."""
        count = len(self.ids)
        self.ids, self.logprobs, self.versions, self.served = token_ids(), floats(), [], None
        self.alternatives = []
        return count


class Piece(msgspec.Struct, frozen=True):
    """One response of an engine: a whole completion, or the part that was sampled before an abort."""

    ids: TokenIds
    logprobs: Floats
    finish: FinishReason
    label: str | None = None
    """The label of the weights that made it, if the engine reports it."""
    text: str | None = None
    """Set only if the ids are missing; then the completion is not exact."""
    served: float | None = None
    """Seconds that the engine reports; `None`: it reports none."""
    alternatives: Alternatives = ()
    """Of each id, if they were asked for."""


def check_piece(
    partial: PartialCompletion,
    ids: Sequence[int] | None,
    logprobs: Sequence[float | None] | None,
    finish: FinishReason,
    *,
    seen: Sequence[int] | None = None,
    label: str | None = None,
) -> Piece:
    """Build a piece; raise `FormatError` for a response that is not whole or belongs to another request."""
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


def with_alternatives(
    piece: Piece, partial: PartialCompletion, told: Sequence[Iterable[tuple[int, float | None]] | None] | None
) -> Piece:
    """The piece with the likeliest tokens at each place, as ids and log-probabilities in any order, if they were asked for."""
    count = partial.sampling.top_logprobs
    if not count or told is None or len(told) != len(piece.ids):
        return piece
    found = [
        sorted(
            (
                TokenAlternative(id, min(value, 0.0))
                for id, value in each or ()
                if value is not None and value > _LOWEST
            ),
            key=lambda one: -one.logprob,
        )
        for each in told
    ]
    return msgspec.structs.replace(piece, alternatives=tuple(tuple(each[:count]) for each in found))


def _logprobs(values: Sequence[float | None]) -> Floats:
    kept = []
    for place, value in enumerate(values):
        if value is None or not _LOWEST <= value <= MAX_LOGPROB:
            raise FormatError(f"{value} is not the log-probability of token {place}")
        kept.append(min(value, 0.0))
    return floats(kept)
