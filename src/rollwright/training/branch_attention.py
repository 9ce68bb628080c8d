"""Whether a model computes bundles with branches rightly, and what attention costs it.

Always true: a model is trusted only after it was tried: a small tree of tokens in one sequence must give the same outputs as
its branches one by one. A model that fails, or whose layers look at less than the whole row, computes every row by itself.
"""

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

PAIRS_PER_TOKEN = 4
"""Times the hidden size: so many pairs of tokens attend to each other in the time in which one token goes through the rest
of the model. Measured with SmolLM2 on a CPU, forwards and backwards; by operations it is 6 for any transformer whose layers
have 12 times the square of the hidden size in parameters."""

TOLERANCE = 1e-4
"""Largest difference of outputs, relative to the largest output, that is rounding."""

_TRUNK, _BRANCH = 5, 3
"""Tokens before and behind the fork of the tree that is tried."""


def tokens_per_pair(model: "PreTrainedModel") -> float | None:
    """Cost of the attention of one token to another, in tokens that go through the model; `None` if rows that share a prefix
    cannot be computed as one sequence."""
    why = _reason_against(model)
    if why is not None:
        _log.info("rows that share a prefix are computed one by one: %s", why)
        return None
    return 1.0 / (PAIRS_PER_TOKEN * int(model.config.hidden_size))


def _reason_against(model: "PreTrainedModel") -> str | None:
    config: Any = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return "the model's attention is not torch's scaled_dot_product_attention"
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None) is not None:
        return "layers of the model attend to a part of the row"
    if not isinstance(getattr(config, "hidden_size", None), int):
        return "the model has no hidden_size"
    try:
        different = _difference(model)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"the model takes no mask of this kind ({type(error).__name__}: {error})"
    return None if different <= TOLERANCE else f"a tree of tokens gives other outputs ({different:.2g})"


def _difference(model: Any) -> float:
    """Relative difference between a forked sequence and its two branches."""
    device = next(model.parameters()).device
    embeddings: Any = model.get_input_embeddings()
    highest = int(embeddings.num_embeddings)
    size = _TRUNK + 2 * _BRANCH
    ids = (torch.arange(size, device=device) * 7 + 1) % highest
    second = torch.cat((ids[:_TRUNK], ids[_TRUNK + _BRANCH :]))
    mask = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    mask[_TRUNK + _BRANCH :, _TRUNK : _TRUNK + _BRANCH] = False
    positions = torch.cat((torch.arange(_TRUNK + _BRANCH), torch.arange(_TRUNK, _TRUNK + _BRANCH))).to(device)

    def outputs(given: Tensor, **more: Tensor) -> Tensor:
        found: Tensor = model(input_ids=given.unsqueeze(0), use_cache=False, **more).logits[0]
        return found.float()

    training = model.training
    model.eval()
    with torch.no_grad():
        forked = outputs(ids, attention_mask=mask[None, None], position_ids=positions.unsqueeze(0))
        alone = torch.cat((outputs(ids[: _TRUNK + _BRANCH]), outputs(second)[_TRUNK:]))
    model.train(training)
    return float((forked - alone).abs().max() / alone.abs().max().clamp_min(1e-12))
