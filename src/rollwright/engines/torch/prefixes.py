"""The prefix cache: token sequences with cached keys and values, found by their first blocks.

Always true: a prompt that starts with some blocks of a cached sequence finds a sequence that starts with them; only computed
keys and values are returned, never those still being computed; sequences that no call uses are evicted least recently used
first, and together take at most `max_bytes`.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import torch

from rollwright.trajectory import TokenIds


def same_start(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


BLOCK = 16
"""Ids in a block: a shorter common prefix is not worth finding, and a long prompt has few digests."""


@dataclass(eq=False)
class CachedSequence:
    """A token sequence; its first `cached` tokens have keys and values, in a row of the cache or in a copy."""

    tokens: TokenIds
    """While a call is served, this is the call's own array, which grows."""
    digests: list[bytes]
    """One digest for each block and all blocks before it."""
    cached: int = 0
    row: int | None = None
    """Row in the cache; `None`: no call uses the sequence."""
    kept: torch.Tensor | None = None
    """A copy of the keys and values, when no call uses the sequence."""


class Found(NamedTuple):
    """The cached prefix of a prompt."""

    source: CachedSequence | None
    length: int
    """Ids with cached keys and values."""
    coming: int
    """Ids that will be cached once the sequences being computed now are done."""


@dataclass
class Prefixes:
    """Index of the sequences in use, and LRU cache of the others."""

    max_bytes: int
    kept_bytes: int = 0
    _by_block: dict[bytes, CachedSequence] = field(default_factory=dict)
    _kept: OrderedDict[CachedSequence, None] = field(default_factory=OrderedDict)

    def find(self, tokens: TokenIds, digests: list[bytes]) -> Found:
        """The longest cached prefix, without the last id: that one is always fed, because its logits are needed."""
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
        """Index a sequence. Its first `known` ids came from another sequence, which keeps their blocks."""
        for digest in sequence.digests[known // BLOCK :]:
            self._by_block[digest] = sequence

    def keep(self, sequence: CachedSequence) -> None:
        """Keep a sequence that has its own copy now; evict others if there is no room."""
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
    """One digest for each whole block and all blocks before it; `before`: digests known already."""
    digests = list(before or ())
    for start in range(len(digests) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        last = digests[-1] if digests else b""
        digests.append(blake2b(last + tokens[start : start + BLOCK].tobytes(), digest_size=16).digest())
    return digests


def _bytes(sequence: CachedSequence) -> int:
    return 0 if sequence.kept is None else sequence.kept.nbytes
