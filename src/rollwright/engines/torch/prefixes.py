"""How far two generations of the same call differ: what the fast mode is allowed, and is measured by.

Token sequences whose keys and values are at hand, found by how they begin.

What is true: a prompt that begins with some of a sequence's blocks finds a sequence that begins with them; what is
found is computed already, whatever is still being computed; sequences that no call uses are kept, the least recently
used go first, and together they take at most the bytes allowed.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import torch

from rollwright.trajectory import TokenIds


def same_start(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two sequences have in common from their start."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


BLOCK = 16
"""Ids to a block: a shorter common beginning is not worth finding, and a long prompt has few digests."""


@dataclass(eq=False)
class CachedSequence:
    """Tokens, the first `cached` of which have keys and values: in a row of the cache or in a copy of their own."""

    tokens: TokenIds
    """While a call is served these are the call's own, which grow."""
    digests: list[bytes]
    """Of its blocks, each with all before it."""
    cached: int = 0
    row: int | None = None
    """Where it lies in the cache; `None` when no call uses it."""
    kept: torch.Tensor | None = None
    """Its own copy, when no call uses it."""


class Found(NamedTuple):
    """What is at hand for a prompt."""

    source: CachedSequence | None
    length: int
    """Ids that need not be computed."""
    coming: int
    """Ids that need not be computed if one waits until what is being computed now is there."""


@dataclass
class Prefixes:
    """Knows the sequences in use and keeps those that are not."""

    max_bytes: int
    kept_bytes: int = 0
    _by_block: dict[bytes, CachedSequence] = field(default_factory=dict)
    _kept: OrderedDict[CachedSequence, None] = field(default_factory=OrderedDict)

    def find(self, tokens: TokenIds, digests: list[bytes]) -> Found:
        """The longest beginning that is at hand, short of the last id: that one is fed, to have logits behind it."""
        coming = 0
        for blocks in range(len(digests), 0, -1):
            sequence = self._by_block.get(digests[blocks - 1])
            if sequence is None:
                continue
            if sequence.cached < blocks * BLOCK:
                coming = coming or min(blocks * BLOCK, len(tokens) - 1)
                continue
            start = blocks * BLOCK
            more = same_start(sequence.tokens[start : sequence.cached], tokens[start:])
            length = min(start + more, len(tokens) - 1)
            if sequence in self._kept:
                self._kept.move_to_end(sequence)
            return Found(sequence, length, max(coming, length))
        return Found(None, 0, coming)

    def add(self, sequence: CachedSequence, known: int = 0) -> None:
        """From now on it is found. Its first `known` ids came from another sequence, which goes on serving them."""
        for digest in sequence.digests[known // BLOCK :]:
            self._by_block[digest] = sequence

    def keep(self, sequence: CachedSequence) -> None:
        """Takes a sequence that has its own copy now; others may have to go for it."""
        self._kept[sequence] = None
        self.kept_bytes += _bytes(sequence)
        while self.kept_bytes > self.max_bytes:
            self.remove(next(iter(self._kept)))

    def remove(self, sequence: CachedSequence) -> None:
        if sequence in self._kept:
            del self._kept[sequence]
            self.kept_bytes -= _bytes(sequence)
        for digest in sequence.digests:
            if self._by_block.get(digest) is sequence:
                del self._by_block[digest]

    def clear(self) -> None:
        self._by_block.clear()
        self._kept.clear()
        self.kept_bytes = 0


def block_digests(tokens: TokenIds, before: list[bytes] | None = None) -> list[bytes]:
    """One for each whole block, of it and all blocks before it; `before` are those known already."""
    digests = list(before or ())
    for start in range(len(digests) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        last = digests[-1] if digests else b""
        digests.append(blake2b(last + tokens[start : start + BLOCK].tobytes(), digest_size=16).digest())
    return digests


def _bytes(sequence: CachedSequence) -> int:
    return 0 if sequence.kept is None else sequence.kept.nbytes
