"""The loss that the settings name: its options checked, its errors in one line.

Always true: a user-defined loss sees the same arguments as a built-in one, and an exception in it names it.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from rollwright.registry import checked_options
from rollwright.training.losses.base import Loss, PolicyLoss, TokenLosses, ratios_of
from rollwright.training.losses.update_tokens import Prepared, UpdateTokens
from rollwright.training.settings import LOSSES, LossSettings


def check_loss(settings: LossSettings) -> None:
    """Refuses an unknown loss, or an option that a built-in one does not have, in one line."""
    found = LOSSES.find(settings.name)
    if isinstance(found, PolicyLoss):
        with LOSSES.blame(settings.name):
            checked_options(found.surrogate, settings.options, found.arguments)


def prepares(settings: LossSettings) -> bool:
    """Whether the loss needs the log-probabilities of the whole update before its first micro-batch."""
    loss = LOSSES.find(settings.name)
    return loss.prepares(settings) if isinstance(loss, PolicyLoss) else hasattr(loss, "prepare")


def prepare(update: UpdateTokens, settings: LossSettings) -> dict[str, Tensor]:
    """What the loss computes from all tokens of an update: by name, one number for each token."""
    with LOSSES.blame(settings.name):
        loss, options = LOSSES.find(settings.name), settings.options
        if isinstance(loss, type):
            loss, options = LOSSES.make(settings.name, **options), {}
        found: Mapping[str, Tensor] = loss.prepare(update, settings, **options)
        for name, each in found.items():
            if each.shape != update.new.shape:
                raise ValueError(
                    f"prepares {tuple(each.shape)} `{name}` for {tuple(update.new.shape)} tokens"
                )
        return dict(found)


def token_losses(
    new: Tensor,
    engine: Tensor,
    advantages: Tensor,
    settings: LossSettings,
    *,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
    prepared: Prepared | None = None,
) -> TokenLosses:
    """Computes the loss that the settings name; an exception in a user-defined one is one line that names it."""
    loss = cast(Loss, LOSSES.function(settings.name, **settings.options))
    more = {} if prepared is None else {"prepared": prepared}
    with LOSSES.blame(settings.name):
        found = loss(
            new, engine, advantages, settings, proximal=proximal, reference=reference, entropy=entropy, **more
        )
        if isinstance(found, Tensor):
            found = _unclipped(found, new, engine)
        if found.losses.shape != new.shape:
            raise ValueError(f"gives {tuple(found.losses.shape)} losses for {tuple(new.shape)} tokens")
        return found


def _unclipped(losses: Tensor, new: Tensor, engine: Tensor) -> TokenLosses:
    ratios = ratios_of(new, engine).detach()
    return TokenLosses(losses, ratios, torch.zeros_like(ratios, dtype=torch.bool), None)
