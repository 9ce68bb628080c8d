"""The segment cache: text that was tokenised before is not tokenised again.

Always true: the ids are those that the tokenizer itself gives for the whole text. A text is cut only at line breaks
between two visible ASCII characters: behind them or before them, whichever this tokenizer is found to give the same ids
for when the cache is made; where it is neither, whole texts are cached. So system prompts, observations and fragments
are reused line by line, across agents, turns and samples.
"""

import re
import string
from collections import OrderedDict
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NoReturn

import msgspec

from rollwright.engines.base import Generation, Policy, Prompt, Renderer, Sampling
from rollwright.engines.rendering.tokenizer import Tokenizer

CACHED_IDS = 1 << 20
"""About 40 MB of Python lists; the least recently used pieces go first."""

BREAKS = re.compile(r"(?<=[!-~])\n+(?=[!-~])")
"""Line breaks with a visible ASCII character on either side."""

TRIED = (*string.punctuation, *"aZ09stmdrvl")
"""What stands for all visible ASCII characters when a tokenizer is tried out: rules name marks one by one, letters and
digits as classes, and beside those the letters of 's, 't, 're and their like."""


class Cut(StrEnum):
    """Where a text is cut."""

    BEHIND = "behind"
    """Behind line breaks: for tokenizers that take a mark and the line breaks after it for one word."""
    BEFORE = "before"
    """Before line breaks: for tokenizers that take the last one of several for a word of its own."""
    NOWHERE = "nowhere"

    def pieces(self, text: str) -> Iterator[str]:
        start = 0
        if self is not Cut.NOWHERE:
            for match in BREAKS.finditer(text):
                end = match.end() if self is Cut.BEHIND else match.start()
                yield text[start:end]
                start = end
        yield text[start:]


class CacheFigures(msgspec.Struct):
    """What a cache has saved so far."""

    asked_ids: int = 0
    """That callers got."""
    encoded_ids: int = 0
    """Of them, those that the tokenizer had to make."""


class SegmentTokenizer:
    """A tokenizer that remembers; everything but `encode` is the tokenizer's own."""

    def __init__(self, tokenizer: Tokenizer, *, cached_ids: int = CACHED_IDS) -> None:
        self._tokenizer: Any = tokenizer
        self._pieces: OrderedDict[str, list[int]] = OrderedDict()
        self._cached = 0
        self._most = cached_ids
        self.cut = exact_cut(tokenizer)
        self.figures = CacheFigures()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: object, **options: object) -> NoReturn:
        """The `renderers` package then takes `encode`, which needs no offsets and gives the same ids."""
        raise NotImplementedError

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if add_special_tokens or not text:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)  # type: ignore[no-any-return]
        ids: list[int] = []
        for piece in self.cut.pieces(text):
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


def exact_cut(tokenizer: Tokenizer) -> Cut:
    """Where cutting changes no ids: tried for every pair of characters that line breaks can stand between.

    A tokenizer that splits text by rules before it merges looks no further than that. One without such rules, and one
    whose marks swallow the space beside them, is not cut at all.
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
        fitting = [each for each in fitting if [i for p in each.pieces(text) for i in encode(p)] == whole]
        if not fitting:
            return Cut.NOWHERE
    return fitting[0]


class WithRenderer:
    """A policy whose prompts are made by another renderer, which must give the same ids."""

    def __init__(self, policy: Policy, renderer: Renderer) -> None:
        self._policy = policy
        self.renderer: Renderer | None = renderer

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
    """The same policy with a cache in front of its tokenizer; itself where it has none."""
    swap = getattr(policy.renderer, "with_tokenizer", None)
    return policy if swap is None else WithRenderer(policy, swap(SegmentTokenizer))
