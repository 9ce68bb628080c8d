"""The loss of each trained token, and its coefficient in the loss of the batch.

Always true: the loss of a batch is the sum over its tokens of coefficient × loss. Coefficients follow from weights and
lengths of the whole batch, so that the gradient of a batch is the sum of the gradients of its parts.
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
"""Log-ratios are clamped to this: larger ones carry no information, and the estimate of the divergence would overflow."""


def token_coefficients(rows: Sequence[PackedRow], settings: LossSettings) -> list[Tensor]:
    """For each row, the coefficients of its trained tokens in the loss of the batch."""
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
    """Loss of each trained token and, without gradient, the terms that it was computed from."""

    losses: Tensor
    ratios: Tensor
    """Ratio of the new probability to the one it is clipped against."""
    clipped: Tensor
    """Whether the clip set the gradient to zero."""
    divergence: Tensor | None
    """Divergence from the base model; `None` without a KL term."""


class Loss(Protocol):
    """Computes the loss of each trained token. All tensors have one element per token; only `new` has a gradient."""

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
        and the base model. A function that returns a plain tensor reports no token as clipped."""
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
    """Computes the loss that the settings name; an exception in a user-defined one is one line that names it."""
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
    """PPO's clipped loss. All tensors have one element per trained token; only `new` has a gradient.

    `proximal`: log-probabilities of the model before the step; `None`: the current values of `new`. `reference`: those of
    the base model, needed for the KL term. `entropy`: needed for the entropy term.
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
    """k3 estimate of KL(new ‖ reference) for each token: never negative, and unbiased for tokens drawn from `new`."""
    difference = _bounded(reference - new)
    return torch.exp(difference) - difference - 1


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
