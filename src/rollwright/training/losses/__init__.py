"""Policy losses: small named functions over tokens, and their aggregation to the loss of a batch."""

from rollwright.training.losses.aggregation import token_coefficients
from rollwright.training.losses.base import Loss, PolicyLoss, Surrogate, TokenLosses
from rollwright.training.losses.divergences import k1, k2, k3
from rollwright.training.losses.named import check_loss, prepare, prepares, token_losses
from rollwright.training.losses.token_wise import clipped_loss
from rollwright.training.losses.update_tokens import UpdateTokens, rollout_indices

__all__ = [
    "Loss",
    "PolicyLoss",
    "Surrogate",
    "TokenLosses",
    "UpdateTokens",
    "check_loss",
    "clipped_loss",
    "k1",
    "k2",
    "k3",
    "prepare",
    "prepares",
    "rollout_indices",
    "token_coefficients",
    "token_losses",
]
