"""Rows: feed the tokens of running calls to the model and give the logits of each call's next token.

There are two implementations. `SharedRows` is fast: calls are batched, and prefixes that they share with each other or with
earlier calls are computed once. `LoneRows` is batch-invariant: each call runs through the model alone, always in the same
shapes and the same memory layout, so its numbers are the same to the bit whatever else is running; that costs one forward
pass for each call and token.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from rollwright.engines.torch.call import Counters, GenerationCall
from rollwright.engines.torch.kv_cache import CacheShape, KVCache, cache_bytes, cache_shape, feed
from rollwright.engines.torch.prefixes import BLOCK, CachedSequence, Found, Prefixes, block_digests

WORTH_WAITING = 32
"""Least ids that a call must save to wait a step for the prefix of another: fewer cost less than the step."""

WORTH_A_PASS = 128
"""Padding tokens that cost about as much as the overhead of one more forward pass through a small model."""

Logits = tuple[list[GenerationCall], torch.Tensor]
"""Calls whose tokens are all fed, and the logits of each call's next token."""


class ModelRows(Protocol):
    """The running calls in the model; used by the worker's thread alone."""

    def admit(self, waiting: deque[GenerationCall]) -> list[GenerationCall]:
        """Take calls from the front as far as there is room; some may be left for the next step.

        Only decides: work that can fail is left to `forward`, when the batcher knows that these calls are running.
        """
        ...

    def forward(self) -> Iterator[Logits]:
        """Feed the tokens that are not fed yet. A long prompt takes several steps; its call has logits in the last."""
        ...

    def release(self, call: GenerationCall) -> None:
        """Remove a call that has ended."""
        ...

    def clear(self) -> None:
        """Remove all calls and all cached keys and values: the weights change."""
        ...


def pack(lengths: Sequence[int], worth_a_pass: int = WORTH_A_PASS) -> list[range]:
    """Split rows, given by their numbers of new tokens, into runs of neighbours that need little padding.

    A row joins the previous run unless the run would then hold more than `worth_a_pass` tokens of padding.
    """
    runs: list[range] = []
    first = total = widest = 0
    for place, length in enumerate(lengths):
        wider = max(widest, length)
        padding = wider * (place - first + 1) - total - length
        if place > first and padding > worth_a_pass:
            runs.append(range(first, place))
            first, total, wider = place, 0, length
        total += length
        widest = wider
    if lengths:
        runs.append(range(first, len(lengths)))
    return runs


def final_length(call: GenerationCall) -> int:
    """Most tokens that a call can have at its end."""
    return call.prompt_tokens + call.max_tokens


@dataclass(frozen=True)
class CacheRoom:
    """Whether calls fit into the memory for keys and values. One call always does."""

    shape: CacheShape
    max_bytes: int | None

    def has(self, calls: int, longest: int) -> bool:
        """Whether calls fit into one cache, where every row has room for the longest."""
        return (
            self.max_bytes is None or calls <= 1 or cache_bytes(self.shape, calls, longest) <= self.max_bytes
        )

    def has_each(self, lengths: Sequence[int]) -> bool:
        """Whether calls with one cache each fit."""
        taken = sum(cache_bytes(self.shape, 1, length) for length in lengths)
        return self.max_bytes is None or len(lengths) <= 1 or taken <= self.max_bytes


class SharedRows:
    """Batched rows. Always true: the sequences in use are in rows 0 to n-1 without gaps, so any run of them is a view."""

    def __init__(
        self,
        model: PreTrainedModel,
        counters: Counters,
        *,
        max_rows: int,
        tokens_per_step: int,
        prefix_bytes: int,
        cache_bytes: int | None = None,
    ) -> None:
        """`cache_bytes`: memory for keys and values of running calls; a call that does not fit waits."""
        self._room = CacheRoom(cache_shape(model), cache_bytes)
        self._model = model
        self._counters = counters
        self._max_rows = max_rows
        self._tokens_per_step = tokens_per_step
        self._cache = KVCache(cache_shape(model), cache_bytes)
        self._prefixes = Prefixes(prefix_bytes)
        self._rows: list[tuple[GenerationCall, CachedSequence]] = []
        self._sequences: dict[GenerationCall, CachedSequence] = {}
        self._joining: list[tuple[GenerationCall, CachedSequence, Found]] = []
        """Admitted calls, which get a row in the next `forward`."""

    def admit(self, waiting: deque[GenerationCall]) -> list[GenerationCall]:
        budget = self._tokens_per_step - sum(len(each.tokens) - each.cached for _, each in self._rows)
        taken = self._joining
        left: list[GenerationCall] = []
        longest = max((final_length(call) for call, _ in self._rows), default=0)
        while waiting and budget > 0 and len(self._rows) + len(taken) < self._max_rows:
            longest = max(longest, final_length(waiting[0]))
            if not self._room.has(len(self._rows) + len(taken) + 1, longest):
                break
            call = waiting.popleft()
            digests = block_digests(call.tokens)
            found = self._prefixes.find(call.tokens, digests)
            todo = len(call.tokens) - found.length
            # Another call is computing the same prefix right now: waiting one step saves computing it twice.
            if found.coming - found.length >= max(WORTH_WAITING, todo // 2):
                left.append(call)
                continue
            sequence = CachedSequence(call.tokens, digests)
            self._prefixes.add(sequence, found.length)
            taken.append((call, sequence, found))
            budget -= todo
        waiting.extendleft(reversed(left))
        return [call for call, _, _ in taken]

    def forward(self) -> Iterator[Logits]:
        self._place_joining()
        if self._rows:
            longest = max(
                min(len(each.tokens), each.cached + self._tokens_per_step) for _, each in self._rows
            )
            self._cache.reserve(len(self._rows), longest)
        fed = [
            (each.tokens[each.cached : each.cached + self._tokens_per_step], each.cached)
            for _, each in self._rows
        ]
        ready: list[GenerationCall] = []
        parts: list[torch.Tensor] = []
        for run in pack([len(tokens) for tokens, _ in fed]):
            logits = feed(self._model, self._cache, run.start, fed[run.start : run.stop])
            self._counters.passes += 1
            lines = []
            for line, place in enumerate(run):
                call, sequence = self._rows[place]
                sequence.cached += len(fed[place][0])
                self._counters.fed_tokens += len(fed[place][0])
                if sequence.cached == len(sequence.tokens):
                    ready.append(call)
                    lines.append(line)
            parts.append(logits if len(lines) == len(run) else logits[lines])
        if ready:
            yield ready, parts[0] if len(parts) == 1 else torch.cat(parts)

    def release(self, call: GenerationCall) -> None:
        sequence = self._sequences.pop(call)
        place = sequence.row
        assert place is not None
        self._retain(sequence, place)
        sequence.row = None
        # The last row fills the gap, so that the rows stay contiguous.
        last_call, last = self._rows.pop()
        if last is not sequence:
            self._cache.move(len(self._rows), place, last.cached)
            self._rows[place] = (last_call, last)
            last.row = place

    def clear(self) -> None:
        self._joining.clear()
        self._rows.clear()
        self._sequences.clear()
        self._prefixes.clear()
        self._cache.clear()

    def _place_joining(self) -> None:
        joining, self._joining = self._joining, []
        if joining:
            served = [call for call, _ in self._rows] + [call for call, _, _ in joining]
            self._cache.reserve(len(served), max(len(call.tokens) for call in served))
        # Calls with similar numbers of new tokens become neighbours, which share a forward pass with little padding.
        for call, sequence, found in sorted(joining, key=lambda each: len(each[0].tokens) - each[2].length):
            self._place(call, sequence, found)

    def _place(self, call: GenerationCall, sequence: CachedSequence, found: Found) -> None:
        row = len(self._rows)
        source = found.source
        if source is not None:
            kept = source.kept if source.row is None else self._cache.read(source.row, source.cached)
            assert kept is not None
            self._cache.write(row, kept[:, :, :, : found.length])
            self._counters.reused_tokens += found.length
            if source.row is None and found.length == source.cached:
                self._prefixes.remove(source)  # the new row holds all of it
                self._prefixes.add(sequence)
        sequence.cached = found.length
        sequence.row = row
        self._rows.append((call, sequence))
        self._sequences[call] = sequence

    def _retain(self, sequence: CachedSequence, place: int) -> None:
        """Keep the keys and values of an ended call for the next turn of its episode and for its siblings."""
        size = sequence.cached * self._cache.shape.token_bytes
        self._prefixes.remove(sequence)
        if not sequence.cached or size > self._prefixes.max_bytes:
            return
        sequence.kept = self._cache.read(place, sequence.cached)
        sequence.tokens = sequence.tokens[: sequence.cached]
        sequence.digests = block_digests(sequence.tokens, sequence.digests[: sequence.cached // BLOCK])
        self._prefixes.add(sequence)
        self._prefixes.keep(sequence)


@dataclass(eq=False)
class _Lone:
    """A call's own cache, and the tokens in it."""

    cache: KVCache
    cached: int = 0


class LoneRows:
    """Batch-invariant rows: nothing is shared, not even common prefixes, so a call's forward passes depend on it alone."""

    def __init__(
        self,
        model: PreTrainedModel,
        counters: Counters,
        *,
        max_rows: int,
        tokens_per_step: int,
        cache_bytes: int | None = None,
    ) -> None:
        self._room = CacheRoom(cache_shape(model), cache_bytes)
        self._model = model
        self._counters = counters
        self._max_rows = max_rows
        self._tokens_per_step = tokens_per_step
        self._shape = cache_shape(model)
        self._rows: dict[GenerationCall, _Lone] = {}

    def admit(self, waiting: deque[GenerationCall]) -> list[GenerationCall]:
        taken = []
        while waiting and len(self._rows) < self._max_rows:
            lengths = [final_length(each) for each in (*self._rows, waiting[0])]
            if not self._room.has_each(lengths):
                break
            call = waiting.popleft()
            self._rows[call] = _Lone(KVCache(self._shape))
            taken.append(call)
        return taken

    def forward(self) -> Iterator[Logits]:
        for call, lone in list(self._rows.items()):
            # The full length at once: a cache that grows would change the memory layout, and with it the rounding.
            lone.cache.reserve(1, final_length(call))
            tokens = call.tokens[lone.cached : lone.cached + self._tokens_per_step]
            logits = feed(self._model, lone.cache, 0, [(tokens, lone.cached)])
            lone.cached += len(tokens)
            self._counters.passes += 1
            self._counters.fed_tokens += len(tokens)
            if lone.cached == len(call.tokens):
                yield [call], logits

    def release(self, call: GenerationCall) -> None:
        del self._rows[call]

    def clear(self) -> None:
        self._rows.clear()
