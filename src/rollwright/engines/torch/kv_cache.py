"""Keys and values of many token sequences in one tensor, one row each, so that a range of rows is a view.

What is true: column `c` of a row belongs to the token at position `c`; a query at position `p` looks at columns up to
`p` alone, so whatever lies behind a row's end is never seen. It must be finite all the same (zero times infinity is
not zero), hence the zeros. One more column takes what the padding writes.
"""

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rollwright.errors import ConfigError
from rollwright.trajectory import TokenIds

COLUMN_STEP = 64
"""Columns are added in multiples of this, so that growing is rare and little is wasted."""

GROUPED_ATTENTION = "rollwright_grouped"
"""The name under which transformers knows `grouped_attention`."""

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
    """Grows as needed, and shrinks only to stay within `max_bytes`; `clear` gives everything back.

    Each layer has a tensor of its own, so that growing needs room for one layer more and not for a second cache."""

    def __init__(self, shape: CacheShape, max_bytes: int | None = None) -> None:
        """`max_bytes`: whoever reserves sees to it that the rows in use fit; rows that are not in use are given up."""
        self.shape = shape
        self._max_bytes = max_bytes
        self._layers = self._empty()

    @property
    def rows(self) -> int:
        return self._layers[0].shape[1]

    @property
    def columns(self) -> int:
        """Without the one for the padding, which comes after them."""
        return self._layers[0].shape[3] - 1

    def reserve(self, rows: int, columns: int) -> None:
        """Room for so many rows, which are all that are in use, with so many columns."""
        if rows <= self.rows and columns <= self.columns:
            return
        new_rows, new_columns = self._grown(rows, columns)
        kept_rows, kept_columns = min(new_rows, self.rows), min(new_columns, self.columns)
        for place, old in enumerate(self._layers):
            new = self._zeros(new_rows, new_columns)
            new[:, :kept_rows, :, :kept_columns] = old[:, :kept_rows, :, :kept_columns]
            self._layers[place] = new

    def _grown(self, rows: int, columns: int) -> tuple[int, int]:
        """The next size: with room to grow, without it where that would be too much, and at the least just enough."""
        wide = _whole_steps(max(columns, int(self.columns * GROWTH)) if columns > self.columns else columns)
        tall = max(rows, int(self.rows * GROWTH)) if rows > self.rows else rows
        sizes = [
            (max(tall, self.rows), max(wide, self.columns)),
            (max(rows, self.rows), max(_whole_steps(columns), self.columns)),
        ]
        for size in sizes:
            if self._max_bytes is None or cache_bytes(self.shape, *size) <= self._max_bytes:
                return size
        return rows, _whole_steps(columns)

    def clear(self) -> None:
        self._layers = self._empty()

    def move(self, source: int, target: int, length: int) -> None:
        for layer in self._layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]

    def read(self, row: int, length: int) -> torch.Tensor:
        """A copy of one row: layers, keys and values, heads, columns, numbers."""
        return torch.stack([layer[:, row, :, :length] for layer in self._layers])

    def write(self, row: int, kept: torch.Tensor) -> None:
        for layer, own in zip(self._layers, kept, strict=True):
            layer[:, row, :, : own.shape[2]] = own

    def layer(self, layer: int, first: int, count: int) -> torch.Tensor:
        """Keys and values of a range of rows, padding column included."""
        return self._layers[layer][:, first : first + count]

    def _empty(self) -> list[torch.Tensor]:
        return [self._zeros(0, 0) for _ in range(self.shape.layers)]

    def _zeros(self, rows: int, columns: int) -> torch.Tensor:
        of = self.shape
        return torch.zeros((2, rows, of.heads, columns + 1, of.head_size), dtype=of.dtype, device=of.device)


def cache_bytes(shape: CacheShape, rows: int, columns: int) -> int:
    """What a cache of this size takes, the padding column included."""
    return rows * (_whole_steps(columns) + 1) * shape.token_bytes


def _whole_steps(columns: int) -> int:
    return -(-columns // COLUMN_STEP) * COLUMN_STEP


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


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' own in every case but ours: a mask, no dropout, nothing unusual."""
    if (
        attention_mask is None
        or dropout
        or any(options.get(each) is not None for each in ("position_bias", "softcap"))
    ):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    grouped = query.shape[1] != key.shape[1]
    made = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=grouped
    )
    return made.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Where it helps; its results are those of `sdpa`."""
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(GROUPED_ATTENTION)
