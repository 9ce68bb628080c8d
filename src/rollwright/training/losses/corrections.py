"""Weights for the difference between the engine that sampled and the model before the step.

Always true: a weight has no gradient. With `ratio: proximal` it is an importance weight, truncated or masked. With
`ratio: engine` the ratio of the loss is the importance weight already, so only the masks apply, as 0 or 1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rollwright.training.losses.divergences import bounded
from rollwright.training.losses.update_tokens import UpdateTokens
from rollwright.training.settings import Correction, LossSettings, Ratio


@dataclass(frozen=True)
class Correct:
    """The correction that the settings name."""

    settings: LossSettings

    def tokens(self, log_ratios: Tensor) -> Tensor | None:
        """Weights of tokens from their own log-ratios of model before the step to engine; `None`: all 1."""
        settings = self.settings
        match settings.correction:
            case Correction.TRUNCATE if settings.ratio is Ratio.PROXIMAL:
                return torch.exp(bounded(log_ratios)).clamp(max=settings.truncation)
            case Correction.MASK:
                return self._masked(log_ratios)
        return None

    def rollouts(self, update: UpdateTokens) -> Tensor | None:
        """Weights of tokens from the log-ratios of their whole rollouts; `None`: all 1."""
        log_ratios = update.before - update.engine
        match self.settings.correction:
            case Correction.SEQUENCE_TRUNCATE if self.settings.ratio is Ratio.PROXIMAL:
                product = torch.exp(bounded(update.rollout_sum(log_ratios)))
                return product.clamp(max=self.settings.truncation)
            case Correction.SEQUENCE_MASK:
                return self._masked(update.rollout_sum(log_ratios))
            case Correction.GEOMETRIC_MASK:
                mean = update.rollout_mean(bounded(log_ratios))
                return self._inside(mean).to(mean.dtype)
        return self.tokens(log_ratios)

    def _masked(self, log_ratios: Tensor) -> Tensor:
        ratios = torch.exp(bounded(log_ratios))
        inside = (ratios >= self.settings.truncation_low) & (ratios <= self.settings.truncation)
        return torch.where(inside, ratios if self.settings.ratio is Ratio.PROXIMAL else 1.0, 0.0)

    def _inside(self, log_ratios: Tensor) -> Tensor:
        low = math.log(self.settings.truncation_low) if self.settings.truncation_low else -math.inf
        return (log_ratios >= low) & (log_ratios <= math.log(self.settings.truncation))


def correction_weights(update: UpdateTokens, settings: LossSettings) -> Tensor:
    """Weights of all tokens of an update, where the weight of a token depends on its whole rollout."""
    found = Correct(settings).rollouts(update)
    weights = torch.ones_like(update.new) if found is None else found
    if settings.max_rollout_divergence is not None:
        divergence = update.rollout_mean(update.engine - update.new)
        far = divergence > settings.max_rollout_divergence
        weights = weights * ~(far & (update.advantages < 0))
    return weights
