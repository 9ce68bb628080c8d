"""Losses with one ratio for each rollout: GSPO and GMPO.

Always true: the ratio of a rollout is a constant of the update; each token carries the gradient of its own share.
"""

import torch
from torch import Tensor

from rollwright.training.losses.base import PolicyLoss, Surrogate, required
from rollwright.training.losses.divergences import bounded
from rollwright.training.losses.update_tokens import Prepared, UpdateTokens
from rollwright.training.settings import LossSettings


def _mean_log_ratio(
    update: UpdateTokens, settings: LossSettings, *, max_log_ratio: float = 10.0
) -> dict[str, Tensor]:
    return {"log_ratio": update.rollout_mean(update.new - update.old)}


def _gspo(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    settings: LossSettings,
    prepared: Prepared | None,
    *,
    max_log_ratio: float = 10.0,
) -> Surrogate:
    """GSPO: PPO's clip on the geometric mean of the rollout's ratios; its logarithm is clamped above, as in verl."""
    own = required(prepared, "log_ratio") + new - new.detach()
    ratios = torch.exp(own.clamp(max=max_log_ratio))
    kept = ratios.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    plain, inside = ratios * advantages, kept * advantages
    return Surrogate(-torch.minimum(plain, inside), ratios, inside < plain)


def _clipped_log_ratios(
    new: Tensor, old: Tensor, advantages: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """Log-ratios, clipped where the clip lowers the gain, and whether they were."""
    log_ratios = bounded(new - old)
    inside = log_ratios.clamp(-settings.clip_low, settings.clip_high)
    sign = torch.sign(advantages)
    found = sign * torch.minimum(sign * log_ratios, sign * inside)
    return found, sign * inside < sign * log_ratios


def _geometric_mean(update: UpdateTokens, settings: LossSettings) -> dict[str, Tensor]:
    own, _ = _clipped_log_ratios(update.new, update.old, update.advantages, settings)
    return {"log_ratio": update.rollout_mean(own), "advantage": update.rollout_mean(update.advantages)}


def _gmpo(
    new: Tensor, old: Tensor, advantages: Tensor, settings: LossSettings, prepared: Prepared | None
) -> Surrogate:
    """GMPO: the rollout's mean advantage times the geometric mean of its ratios, each clipped by itself."""
    own, clipped = _clipped_log_ratios(new, old, advantages, settings)
    ratios = torch.exp(required(prepared, "log_ratio"))
    losses = -required(prepared, "advantage") * ratios * (1 + own - own.detach())
    return Surrogate(losses, ratios, clipped)


gspo_loss = PolicyLoss(_gspo, _mean_log_ratio)
gmpo_loss = PolicyLoss(_gmpo, _geometric_mean)
