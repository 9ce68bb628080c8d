"""Losses in which a token's loss depends on that token alone: PPO's clip, CISPO, DPPO and SAPO."""

import torch
from torch import Tensor

from rollwright.training.losses.base import PolicyLoss, Surrogate, ratios_of
from rollwright.training.settings import LossSettings


def _clipped(new: Tensor, old: Tensor, advantages: Tensor, settings: LossSettings) -> Surrogate:
    """PPO's clip, symmetric or asymmetric; with `dual_clip` also bounded for negative advantages."""
    ratios = ratios_of(new, old)
    kept = ratios.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    plain, inside = ratios * advantages, kept * advantages
    gain, clipped = torch.minimum(plain, inside), inside < plain
    if settings.dual_clip is not None:
        lowest = settings.dual_clip * advantages
        too_low = (advantages < 0) & (gain < lowest)
        gain, clipped = torch.where(too_low, lowest, gain), clipped | too_low
    return Surrogate(-gain, ratios, clipped)


def _cispo(new: Tensor, old: Tensor, advantages: Tensor, settings: LossSettings) -> Surrogate:
    """CISPO: REINFORCE with the clipped ratio as a constant weight, so that no token loses its gradient."""
    ratios = ratios_of(new, old).detach()
    weights = ratios.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return Surrogate(-weights * advantages * new, ratios, weights != ratios)


def _dppo_tv(
    new: Tensor, old: Tensor, advantages: Tensor, settings: LossSettings, *, truncation: float = 20.0
) -> Surrogate:
    """DPPO with the total variation of token against not-token as its trust region."""
    moved = (new.exp() - old.exp()).detach()
    kept = torch.where(advantages > 0, moved <= settings.clip_high, moved >= -settings.clip_low)
    return _masked_reinforce(new, old, advantages, kept, truncation)


def _dppo_kl(
    new: Tensor, old: Tensor, advantages: Tensor, settings: LossSettings, *, truncation: float = 20.0
) -> Surrogate:
    """DPPO with the divergence of token against not-token as its trust region."""
    with torch.no_grad():
        now, then = new.exp(), old.exp()
        rest = torch.log((1 - then + _NEVER_ZERO) / (1 - now + _NEVER_ZERO))
        divergence = then * (old - new) + (1 - then) * rest
        upwards = (divergence <= settings.clip_high) | (now <= then)
        downwards = (divergence <= settings.clip_low) | (now >= then)
        kept = torch.where(advantages > 0, upwards, downwards)
    return _masked_reinforce(new, old, advantages, kept, truncation)


_NEVER_ZERO = 1e-8
"""Added to probabilities before the logarithm, as in verl."""


def _masked_reinforce(
    new: Tensor, old: Tensor, advantages: Tensor, kept: Tensor, truncation: float
) -> Surrogate:
    ratios = ratios_of(new, old).detach()
    losses = -advantages * ratios.clamp(max=truncation) * new * kept
    return Surrogate(losses, ratios, ~kept)


def _sapo(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    settings: LossSettings,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Surrogate:
    """SAPO: a sigmoid gate around ratio 1 instead of a hard clip; steeper for negative advantages."""
    ratios = ratios_of(new, old)
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    gates = torch.sigmoid(tau * (ratios - 1)) * 4 / tau
    return Surrogate(-gates * advantages, ratios, torch.zeros_like(ratios, dtype=torch.bool))


clipped_loss = PolicyLoss(_clipped)
cispo_loss = PolicyLoss(_cispo)
dppo_tv_loss = PolicyLoss(_dppo_tv)
dppo_kl_loss = PolicyLoss(_dppo_kl)
sapo_loss = PolicyLoss(_sapo)
