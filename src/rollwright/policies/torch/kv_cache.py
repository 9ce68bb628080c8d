"""Keys and values of many token sequences in one tensor, one row each, so that a range of rows is a view.

What is true: column `c` of a row belongs to the token at position `c`; a query at position `p` looks at columns up to
`p` alone, so whatever lies behind a row's end is never seen. It must be finite all the same (zero times infinity is
not zero), hence the zeros. One more column takes what the padding writes.
"""

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from transformers import Cache, PreTrainedModel

from rollwright.errors import ConfigError
from rollwright.trajectory import TokenIds

COLUMN_STEP = 64
"""Columns are added in multiples of this, so that growing is rare and little is wasted."""

GROWTH = 1.25
"""A tensor that must grow becomes this much longer at least: the copying stays linear in what is stored."""


@dataclass(frozen=True)
class CacheShape:
    """What one token needs."""

    layers: int
    heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.heads * self.head_size * self.dtype.itemsize


def cache_shape(model: PreTrainedModel) -> CacheShape:
    """Of a model in which every token sees all before it; others are refused."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    heads = getattr(config, "num_attention_heads", None)
    if heads is None or kinds != {"full_attention"} or (window and not getattr(config, "layer_types", None)):
        raise ConfigError(
            f"model {config.model_type}: has layers that do not see all earlier tokens;"
            " accepted: models with full attention in every layer; serve this one with an engine"
        )
    return CacheShape(
        layers=config.num_hidden_layers,
        heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=model.dtype,
        device=model.device,
    )


class KVCache:
    """Grows as needed and never shrinks; `clear` gives everything back."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self._tensor = self._zeros(0, 0)

    @property
    def rows(self) -> int:
        return self._tensor.shape[2]

    @property
    def columns(self) -> int:
        """Without the one for the padding, which comes after them."""
        return self._tensor.shape[4] - 1

    def reserve(self, rows: int, columns: int) -> None:
        if rows <= self.rows and columns <= self.columns:
            return
        if columns > self.columns:
            columns = max(columns, int(self.columns * GROWTH))
            columns = -(-columns // COLUMN_STEP) * COLUMN_STEP
        if rows > self.rows:
            rows = max(rows, int(self.rows * GROWTH))
        old, self._tensor = self._tensor, self._zeros(max(rows, self.rows), max(columns, self.columns))
        self._tensor[:, :, : old.shape[2], :, : old.shape[4] - 1] = old[..., :-1, :]

    def clear(self) -> None:
        self._tensor = self._zeros(0, 0)

    def move(self, source: int, target: int, length: int) -> None:
        self._tensor[:, :, target, :, :length] = self._tensor[:, :, source, :, :length]

    def read(self, row: int, length: int) -> torch.Tensor:
        """A view of one row: layers, keys and values, heads, columns, numbers."""
        return self._tensor[:, :, row, :, :length]

    def write(self, row: int, kept: torch.Tensor) -> None:
        self._tensor[:, :, row, :, : kept.shape[3]] = kept

    def layer(self, layer: int, first: int, count: int) -> torch.Tensor:
        """Keys and values of a range of rows, padding column included."""
        return self._tensor[layer, :, first : first + count]

    def _zeros(self, rows: int, columns: int) -> torch.Tensor:
        of = self.shape
        return torch.zeros(
            (of.layers, 2, rows, of.heads, columns + 1, of.head_size), dtype=of.dtype, device=of.device
        )


class _Rows(Cache):
    """What the model sees of the cache in one forward pass."""

    def __init__(self, cache: KVCache, first: int, columns: torch.Tensor, longest: int) -> None:
        super().__init__(layers=[])
        self._cache = cache
        self._first = first
        self._columns = columns
        self._lines = torch.arange(columns.shape[0], device=columns.device)[:, None]
        self._longest = longest

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._cache.layer(layer_idx, self._first, self._columns.shape[0])
        keys[self._lines, :, self._columns] = key_states.transpose(1, 2)
        values[self._lines, :, self._columns] = value_states.transpose(1, 2)
        return keys[:, :, : self._longest], values[:, :, : self._longest]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._longest


def feed(model: PreTrainedModel, cache: KVCache, first: int, fed: list[tuple[TokenIds, int]]) -> torch.Tensor:
    """Feeds each row from `first` on its new tokens, given with the position of the first of them.

    Returns the logits behind each row's last token. Shorter rows are padded at their start, so that all end at the
    same place and the model itself computes logits only there.
    """
    lengths = numpy.array([len(tokens) for tokens, _ in fed])
    starts = numpy.array([start for _, start in fed])
    widest, longest = int(lengths.max()), int((starts + lengths).max())
    cache.reserve(first + len(fed), longest)
    ids = numpy.zeros((len(fed), widest), dtype=numpy.int64)
    for line, (tokens, _) in zip(ids, fed, strict=True):
        line[widest - len(tokens) :] = tokens
    offsets = numpy.arange(widest)[None] - (widest - lengths)[:, None]
    real = offsets >= 0
    positions = numpy.where(real, starts[:, None] + offsets, 0)
    device = cache.shape.device
    where = torch.from_numpy(positions).to(device)
    columns = torch.from_numpy(numpy.where(real, positions, cache.columns)).to(device)
    unseen = torch.arange(longest, device=device)[None, None] > where[:, :, None]
    mask = torch.zeros(unseen.shape, dtype=cache.shape.dtype, device=device)
    mask.masked_fill_(unseen, float("-inf"))
    made = model(
        input_ids=torch.from_numpy(ids).to(device),
        position_ids=where,
        attention_mask=mask[:, None],
        past_key_values=_Rows(cache, first, columns, longest),
        use_cache=True,
        logits_to_keep=1,
    )
    logits: torch.Tensor = made.logits[:, -1]
    return logits
