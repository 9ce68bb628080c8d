"""The key-value cache: many token sequences in one tensor for each layer, one row each, and the attention over them.

Always true: column `c` of a row belongs to the token at position `c`; a query at position `p` attends to columns up to `p`
alone, so data behind the end of a row is masked. It must still be finite (zero times infinity is not zero), so new columns
are zeros. One extra column receives the keys and values of padding. A range of rows is a view, which costs no copy.
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
"""Columns are added in multiples of this, so that growth is rare and wastes little."""

GROUPED_ATTENTION = "rollwright_grouped"
"""The name under which transformers knows `grouped_attention`."""

GROWTH = 1.25
"""Least growth factor of a tensor: geometric growth keeps copying linear in the stored data."""


@dataclass(frozen=True)
class CacheShape:
    """The shape of one token's keys and values."""

    layers: int
    heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.heads * self.head_size * self.dtype.itemsize


def cache_shape(model: PreTrainedModel) -> CacheShape:
    """The cache shape of a model with full attention in every layer; other models are refused."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    heads = getattr(config, "num_attention_heads", None)
    if heads is None or kinds != {"full_attention"} or (window and not getattr(config, "layer_types", None)):
        raise ConfigError(
            f"model {config.model_type}: has layers without full attention;"
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
    """Grows as needed and shrinks only to stay within `max_bytes`; `clear` frees all memory.

    Each layer has its own tensor, so that growing needs memory for one more layer, not for a second cache."""

    def __init__(self, shape: CacheShape, max_bytes: int | None = None) -> None:
        """`max_bytes`: the caller of `reserve` ensures that the rows in use fit; unused rows are dropped to stay below it."""
        self.shape = shape
        self._max_bytes = max_bytes
        self._layers = self._empty()

    @property
    def rows(self) -> int:
        return self._layers[0].shape[1]

    @property
    def columns(self) -> int:
        """Columns without the padding column behind them."""
        return self._layers[0].shape[3] - 1

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for this many rows, all rows in use, with this many columns."""
        if rows <= self.rows and columns <= self.columns:
            return
        new_rows, new_columns = self._grown(rows, columns)
        kept_rows, kept_columns = min(new_rows, self.rows), min(new_columns, self.columns)
        for place, old in enumerate(self._layers):
            new = self._zeros(new_rows, new_columns)
            new[:, :kept_rows, :, :kept_columns] = old[:, :kept_rows, :, :kept_columns]
            self._layers[place] = new

    def _grown(self, rows: int, columns: int) -> tuple[int, int]:
        """The next size: with room to grow if that fits `max_bytes`, else without, else exactly as much as needed."""
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
    """Bytes of a cache of this size, the padding column included."""
    return rows * (_whole_steps(columns) + 1) * shape.token_bytes


def _whole_steps(columns: int) -> int:
    return -(-columns // COLUMN_STEP) * COLUMN_STEP


class _RowsView(Cache):
    """The rows of one forward pass, in the cache interface of transformers."""

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
    """Feed new tokens to the rows from `first` on; `fed` gives each row's tokens and the position of the first of them.

    Returns the logits behind each row's last token. Shorter rows are padded on the left, so that all rows end in the same
    column and the model computes logits only there.
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
    # Padding writes to the extra column, which no query attends to.
    columns = torch.from_numpy(numpy.where(real, positions, cache.columns)).to(device)
    unseen = torch.arange(longest, device=device)[None, None] > where[:, :, None]
    mask = torch.zeros(unseen.shape, dtype=cache.shape.dtype, device=device)
    mask.masked_fill_(unseen, float("-inf"))
    made = model(
        input_ids=torch.from_numpy(ids).to(device),
        position_ids=where,
        attention_mask=mask[:, None],
        past_key_values=_RowsView(cache, first, columns, longest),
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
    """Scaled dot-product attention with grouped queries, without copying the keys for each query head.

    transformers repeats keys and values as soon as there is a mask, because that is faster on CUDA; on a CPU it is five times
    slower than torch's own grouping. Cases without a mask, or with dropout or a bias, go to transformers.
    """
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
    """Switch a model on the CPU from `sdpa` to `grouped_attention`, which gives the same results."""
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(GROUPED_ATTENTION)
