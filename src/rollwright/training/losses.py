"""The loss of each trained token, and what it is multiplied with.

A batch's loss is the sum over its tokens of coefficient × loss. The coefficients are made once for the batch, from
weights and lengths alone, so that the gradient of the batch is the sum of the gradients of any parts of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from rollwright.training.micro_batches import PackedRow
from rollwright.training.settings import LOSSES, Aggregation, LossSettings, Ratio

LARGEST_LOG_RATIO = math.log(1e4)
"""Ratios beyond it say only that something is very wrong; without a bound, the estimate of the divergence overflows."""


def token_coefficients(rows: Sequence[PackedRow], settings: LossSettings) -> list[Tensor]:
    """For each row, what the losses of its trained tokens are multiplied with."""
    tokens: dict[str, float] = {}
    for row in rows:
        tokens[row.rollout_id] = tokens.get(row.rollout_id, 0.0) + float(row.weights.sum(dtype=torch.float64))
    match settings.aggregation:
        case Aggregation.TOKEN_MEAN:
            divisors = dict.fromkeys(tokens, math.fsum(tokens.values()))
        case Aggregation.SEQUENCE_MEAN:
            divisors = {rollout: own * len(tokens) for rollout, own in tokens.items()}
        case Aggregation.CONSTANT:
            divisors = dict.fromkeys(tokens, float(settings.constant_length * len(tokens)))
    return [row.weights / divisors[row.rollout_id] for row in rows]


@dataclass(frozen=True)
class TokenLosses:
    """For each trained token its loss and, without gradient, what led to it."""

    losses: Tensor
    ratios: Tensor
    """Of the new probability to the one it is clipped against."""
    clipped: Tensor
    """Where the clip took the gradient away."""
    divergence: Tensor | None
    """From the base model, where it is asked for."""


class Loss(Protocol):
    """A loss of each trained token. All tensors hold one number for each; `new` alone carries a gradient."""

    def __call__(
        self,
        new: Tensor,
        engine: Tensor,
        advantages: Tensor,
        settings: LossSettings,
        *,
        proximal: Tensor | None = None,
        reference: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> TokenLosses | Tensor:
        """`new`, `engine`, `proximal`, `reference`: log-probabilities of the model, the engine, the model before the step
        and the base model. A loss that gives a tensor alone reports nothing as clipped."""
        ...


def token_losses(
    new: Tensor,
    engine: Tensor,
    advantages: Tensor,
    settings: LossSettings,
    *,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> TokenLosses:
    """The loss that the settings name; an exception in one of the user's own is one line that names it."""
    if settings.name == "clipped":
        return clipped_loss(
            new, engine, advantages, settings, proximal=proximal, reference=reference, entropy=entropy
        )
    loss = cast(Loss, LOSSES.function(settings.name, **settings.options))
    with LOSSES.blame(settings.name):
        found = loss(
            new, engine, advantages, settings, proximal=proximal, reference=reference, entropy=entropy
        )
        if isinstance(found, Tensor):
            found = _unclipped(found, new, engine)
        if found.losses.shape != new.shape:
            raise ValueError(f"gives {tuple(found.losses.shape)} losses for {tuple(new.shape)} tokens")
        return found


def _unclipped(losses: Tensor, new: Tensor, engine: Tensor) -> TokenLosses:
    ratios = torch.exp(_bounded(new - engine)).detach()
    return TokenLosses(losses, ratios, torch.zeros_like(ratios, dtype=torch.bool), None)


def clipped_loss(
    new: Tensor,
    engine: Tensor,
    advantages: Tensor,
    settings: LossSettings,
    *,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> TokenLosses:
    """All arguments hold one number for each trained token; `new` carries the gradient.

    `proximal`: the trainer's log-probabilities before the step; `None`: `new`'s own values are. `reference`: the
    base model's, needed for the divergence. `entropy`: needed for its term.
    """
    old, weights = engine, None
    if settings.ratio is Ratio.PROXIMAL:
        old = new.detach() if proximal is None else proximal
        weights = torch.exp(_bounded(old - engine)).clamp(max=settings.truncation)
    ratios = torch.exp(_bounded(new - old))
    kept = ratios.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    plain, clipped = ratios * advantages, kept * advantages
    gain = torch.minimum(plain, clipped)
    if weights is not None:
        gain = weights * gain
    losses, divergence = -gain, None
    if reference is not None and settings.kl_coefficient:
        divergence = k3(new, reference)
        losses = losses + settings.kl_coefficient * divergence
    if entropy is not None and settings.entropy_coefficient:
        losses = losses - settings.entropy_coefficient * entropy
    return TokenLosses(
        losses=losses,
        ratios=ratios.detach(),
        clipped=(clipped < plain).detach(),
        divergence=None if divergence is None else divergence.detach(),
    )


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """Divergence of `new` from `reference`, estimated for each token: never negative, and unbiased under `new`."""
    difference = _bounded(reference - new)
    return torch.exp(difference) - difference - 1


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
