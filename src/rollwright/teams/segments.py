"""Segment cache of a tokenizer: lines that were tokenised before are not tokenised again.

Always true: the ids equal those that the tokenizer gives for the whole text. Texts are split only at line breaks between
two visible ASCII characters, either after or before the breaks. When the cache is created, both are compared with the
unsplit result for this tokenizer; if both differ, whole texts are cached. So system prompts, observations and fragments
are reused line by line, across agents, turns and rollouts.
"""

import re
import string
from collections import OrderedDict
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NoReturn

import msgspec

from rollwright.engines.base import Generation, Policy, Prompt, Renderer, Sampling, constrains_output
from rollwright.engines.rendering.tokenizer import Tokenizer

CACHED_IDS = 1 << 20
"""About 40 MB of Python lists; the least recently used segments are evicted first."""

BREAKS = re.compile(r"(?<=[!-~])\n+(?=[!-~])")
"""Line breaks with a visible ASCII character on either side."""

TRIED = (*string.punctuation, *"aZ09stmdrvl")
"""Sample of the visible ASCII characters with which a tokenizer is checked. Pre-tokenizer rules name punctuation marks one
by one, but letters and digits as classes, except for the letters of contractions ('s, 't, 're …)."""


class Cut(StrEnum):
    """Where a text is split."""

    BEHIND = "behind"
    """After line breaks: for tokenizers that join a punctuation mark and the line breaks after it into one word."""
    BEFORE = "before"
    """Before line breaks: for tokenizers that treat the last of several line breaks as a word of its own."""
    NOWHERE = "nowhere"
    """No split keeps the ids: whole texts are cached."""

    def segments(self, text: str) -> Iterator[str]:
        start = 0
        if self is not Cut.NOWHERE:
            for match in BREAKS.finditer(text):
                end = match.end() if self is Cut.BEHIND else match.start()
                yield text[start:end]
                start = end
        yield text[start:]


class SegmentCacheStats(msgspec.Struct):
    """Counters of a cache."""

    asked_ids: int = 0
    """Ids returned to callers."""
    encoded_ids: int = 0
    """Ids that the tokenizer computed, because they were not cached."""


class SegmentTokenizer:
    """A tokenizer with an LRU cache in front of `encode`; every other attribute is the tokenizer's own."""

    def __init__(self, tokenizer: Tokenizer, *, cached_ids: int = CACHED_IDS) -> None:
        self._tokenizer: Any = tokenizer
        self._pieces: OrderedDict[str, list[int]] = OrderedDict()
        self._cached = 0
        self._most = cached_ids
        self.cut = find_exact_cut(tokenizer)
        self.figures = SegmentCacheStats()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: object, **options: object) -> NoReturn:
        """Not supported, so that the `renderers` package falls back to `encode`, which gives the same ids."""
        raise NotImplementedError

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if add_special_tokens or not text:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)  # type: ignore[no-any-return]
        ids: list[int] = []
        for piece in self.cut.segments(text):
            ids += self._piece(piece)
        self.figures.asked_ids += len(ids)
        return ids

    def _piece(self, piece: str) -> list[int]:
        found = self._pieces.get(piece)
        if found is not None:
            self._pieces.move_to_end(piece)
            return found
        ids: list[int] = self._tokenizer.encode(piece, add_special_tokens=False)
        self.figures.encoded_ids += len(ids)
        self._pieces[piece] = ids
        self._cached += len(ids)
        while self._cached > self._most:
            _, dropped = self._pieces.popitem(last=False)
            self._cached -= len(dropped)
        return ids


def find_exact_cut(tokenizer: Tokenizer) -> Cut:
    """The split that changes no ids, checked for every pair of characters around line breaks.

    Checking pairs suffices for a tokenizer with a pre-tokenizer: its rules look at the neighbouring characters only, and
    merges do not cross its words. A tokenizer without one, or with special tokens that strip adjacent white space, is
    never split.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.pre_tokenizer is None:
        return Cut.NOWHERE
    marks = tokenizer.added_tokens_decoder.values()
    if any(mark.lstrip or mark.rstrip or mark.single_word for mark in marks):
        return Cut.NOWHERE
    fitting = [Cut.BEHIND, Cut.BEFORE]
    known: dict[str, list[int]] = {}

    def encode(piece: str) -> list[int]:
        if piece not in known:
            known[piece] = tokenizer.encode(piece, add_special_tokens=False)
        return known[piece]

    for text in (f"a{x}{breaks}{y}b" for breaks in ("\n", "\n\n") for x in TRIED for y in TRIED):
        whole = tokenizer.encode(text, add_special_tokens=False)
        fitting = [each for each in fitting if [i for p in each.segments(text) for i in encode(p)] == whole]
        if not fitting:
            return Cut.NOWHERE
    return fitting[0]


class WithRenderer:
    """A policy with a different renderer, which must give the same ids."""

    def __init__(self, policy: Policy, renderer: Renderer) -> None:
        self._policy = policy
        self.renderer: Renderer | None = renderer

    @property
    def constrains_output(self) -> bool:
        return constrains_output(self._policy)

    @property
    def version(self) -> int:
        return self._policy.version

    @property
    def pressure(self) -> int:
        return self._policy.pressure

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        return await self._policy.generate(prompt, sampling)

    async def close(self) -> None:
        await self._policy.close()


def with_segment_cache(policy: Policy) -> Policy:
    """The same policy with a segment cache in front of its tokenizer; unchanged if it has no tokenizer."""
    swap = getattr(policy.renderer, "with_tokenizer", None)
    return policy if swap is None else WithRenderer(policy, swap(SegmentTokenizer))
