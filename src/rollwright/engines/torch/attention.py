"""Which rows go through the model together. Pure.

Attention over a padded batch whose keys are shared by several queries, without copying the keys for each of them.

transformers repeats keys and values as soon as there is a mask, because that is faster on CUDA. On a CPU it is five
times slower than letting torch group the queries.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

WORTH_A_PASS = 128
"""Padding tokens that cost about as much as one more pass through a small model does for its overhead alone."""


def pack(lengths: Sequence[int], worth_a_pass: int = WORTH_A_PASS) -> list[range]:
    """Cuts rows that are to be fed so many tokens each into runs of neighbours with little padding.

    A row joins the run before it unless the run would then hold more than `worth_a_pass` tokens of padding.
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


NAME = "rollwright_grouped"


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


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Where it helps; its results are those of `sdpa`."""
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)
