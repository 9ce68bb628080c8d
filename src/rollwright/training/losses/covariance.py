"""Losses that restrain the tokens which lower entropy most: Clip-Cov and KL-Cov.

Always true: the covariance of a token is the product of its advantage and its log-probability, each minus its mean over
the whole update; the choice of tokens is a constant of the update and, for a given seed, always the same.
"""

import torch
from torch import Tensor

from rollwright.training.losses.base import PolicyLoss, Surrogate, ratios_of, required
from rollwright.training.losses.divergences import bounded
from rollwright.training.losses.update_tokens import Prepared, UpdateTokens
from rollwright.training.settings import LossSettings


def _clips(
    new: Tensor, old: Tensor, advantages: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor]:
    ratios = ratios_of(new, old)
    kept = ratios.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    plain, inside = ratios * advantages, kept * advantages
    return ratios, torch.minimum(plain, inside), inside < plain


def _covariance(update: UpdateTokens) -> Tensor:
    advantages, new = update.advantages, update.new
    return (advantages - update.mean(advantages)) * (new - update.mean(new))


def _choose_between(
    update: UpdateTokens,
    settings: LossSettings,
    *,
    share: float = 0.0002,
    low: float = 1.0,
    high: float = 5.0,
) -> dict[str, Tensor]:
    """At random, `share` of all tokens among those with a covariance between `low` and `high` that are not clipped."""
    _, _, clipped = _clips(update.new, update.old, update.advantages, settings)
    covariance = _covariance(update)
    candidates = ((covariance > low) & (covariance < high) & ~clipped).nonzero().squeeze(1)
    count = max(int(share * len(update.new)), 1)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(update.seed))
    chosen = torch.zeros_like(update.new, dtype=torch.bool)
    chosen[candidates[order[:count].to(candidates.device)]] = True
    return {"chosen": chosen}


def _clip_cov(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    settings: LossSettings,
    prepared: Prepared | None,
    *,
    share: float = 0.0002,
    low: float = 1.0,
    high: float = 5.0,
) -> Surrogate:
    """Clip-Cov: PPO's clip, without some tokens of high covariance, chosen at random."""
    ratios, gain, clipped = _clips(new, old, advantages, settings)
    chosen = required(prepared, "chosen")
    return Surrogate(-gain * ~chosen, ratios, clipped | chosen)


def _choose_largest(
    update: UpdateTokens, settings: LossSettings, *, share: float = 0.0002, coefficient: float = 1.0
) -> dict[str, Tensor]:
    """The `share` of all tokens with the largest covariance."""
    chosen = torch.zeros_like(update.new, dtype=torch.bool)
    count = max(int(share * len(update.new)), 1)
    chosen[torch.topk(_covariance(update), count).indices] = True
    return {"chosen": chosen}


def _kl_cov(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    settings: LossSettings,
    prepared: Prepared | None,
    *,
    share: float = 0.0002,
    coefficient: float = 1.0,
) -> Surrogate:
    """KL-Cov: no clip; the tokens of largest covariance have a penalty on the absolute log-ratio."""
    ratios = ratios_of(new, old)
    penalty = coefficient * bounded(new - old).abs() * required(prepared, "chosen")
    return Surrogate(penalty - ratios * advantages, ratios, torch.zeros_like(ratios, dtype=torch.bool))


clip_cov_loss = PolicyLoss(_clip_cov, _choose_between)
kl_cov_loss = PolicyLoss(_kl_cov, _choose_largest)
