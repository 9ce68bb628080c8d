"""The contract of a loss, and what the built-in ones are composed of.

Always true: a loss is computed token by token, in micro-batches; whatever a token's loss needs to know of other tokens
(the ratio of its rollout, a choice among all tokens of the update) is computed before, for the whole update and without
gradient, by the loss's `prepare`. So the gradient of an update does not depend on how it is split into micro-batches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rollwright.training.losses.corrections import Correct, correction_weights
from rollwright.training.losses.divergences import bounded, estimate
from rollwright.training.losses.update_tokens import Prepared, UpdateTokens
from rollwright.training.settings import LossSettings, Ratio


@dataclass(frozen=True)
class TokenLosses:
    """Loss of each trained token and, without gradient, the terms that it was computed from."""

    losses: Tensor
    ratios: Tensor
    """Ratio of the new probability to the one it is clipped against; of the rollout, in losses of whole rollouts."""
    clipped: Tensor
    """Whether the loss set the token's gradient to zero or, in CISPO, clipped its weight."""
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
        and the base model. A function that returns a plain tensor reports no token as clipped. A function with an attribute
        `prepare` is also given `prepared`: the tensors that `prepare(UpdateTokens, settings)` returned for all tokens of
        the update, cut to the tokens of this call."""
        ...


@dataclass(frozen=True)
class Surrogate:
    """The policy-gradient part of a loss, for each token."""

    losses: Tensor
    ratios: Tensor
    clipped: Tensor


class PolicyLoss:
    """A surrogate with the parts that all built-in losses share: which ratio, correction for the engine, KL and entropy.

    Callable as a `Loss`. Keyword arguments that are not named here are options of the surrogate.
    """

    def __init__(
        self,
        surrogate: Callable[..., Surrogate],
        prepare: Callable[..., dict[str, Tensor]] | None = None,
    ) -> None:
        """`surrogate(new, old, advantages, settings, **options)`, or with `prepare`: `surrogate(new, old, advantages,
        settings, prepared, **options)` and `prepare(update, settings, **options)` with the same options."""
        self.surrogate = surrogate
        self.arguments = 4 if prepare is None else 5
        """Number of the surrogate's arguments before its options."""
        self._prepare = prepare
        self.__doc__ = surrogate.__doc__

    def prepares(self, settings: LossSettings) -> bool:
        """Whether `prepare` is needed with these settings."""
        return self._prepare is not None or settings.corrects_rollouts

    def prepare(self, update: UpdateTokens, settings: LossSettings, **options: Any) -> dict[str, Tensor]:
        found = {} if self._prepare is None else self._prepare(update, settings, **options)
        if settings.corrects_rollouts:
            found["correction"] = correction_weights(update, settings)
        return found

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
        prepared: Prepared | None = None,
        **options: Any,
    ) -> TokenLosses:
        before = new.detach() if proximal is None else proximal
        old = before if settings.ratio is Ratio.PROXIMAL else engine
        more = () if self._prepare is None else (prepared,)
        found = self.surrogate(new, old, advantages, settings, *more, **options)
        losses, divergence = found.losses, None
        weights = prepared["correction"] if prepared and settings.corrects_rollouts else None
        if weights is None:
            weights = Correct(settings).tokens(before - engine)
        if weights is not None:
            losses = weights * losses
        if reference is not None and settings.kl_coefficient:
            divergence = estimate(new, reference, settings.kl_estimator, settings.kl_limit)
            losses = losses + settings.kl_coefficient * divergence
        if entropy is not None and settings.entropy_coefficient:
            losses = losses - settings.entropy_coefficient * entropy
        return TokenLosses(
            losses=losses,
            ratios=found.ratios.detach(),
            clipped=found.clipped.detach(),
            divergence=None if divergence is None else divergence.detach(),
        )


def ratios_of(new: Tensor, old: Tensor) -> Tensor:
    """Ratio of the new probability to the old one."""
    return torch.exp(bounded(new - old))


def required(prepared: Mapping[str, Tensor] | None, name: str) -> Tensor:
    """A tensor of `prepare`; a call without it is a fault of the caller."""
    if prepared is None or name not in prepared:
        raise ValueError(f"this loss needs `{name}` of the whole update: call `prepare` first")
    return prepared[name]
