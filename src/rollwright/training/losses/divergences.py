"""Estimates of KL(new ‖ reference) from the tokens that were sampled (Schulman 2020), token by token.

Always true: log-ratios are clamped to ±`LARGEST_LOG_RATIO`, so every estimate is finite in 32-bit floats.
"""

import torch
from torch import Tensor

from rollwright.training.settings import KLEstimator

LARGEST_LOG_RATIO = 20.0
"""Larger log-ratios carry no information; verl clamps to the same. exp(20) and its sums are finite in 32-bit floats."""


def bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def k1(new: Tensor, reference: Tensor) -> Tensor:
    """Unbiased, with the highest variance; its own gradient is zero in expectation."""
    return bounded(new - reference)


def k2(new: Tensor, reference: Tensor) -> Tensor:
    """Biased, never negative; its gradient is that of the divergence in expectation."""
    return 0.5 * bounded(new - reference).square()


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """Never negative, and unbiased for tokens drawn from `new`."""
    difference = bounded(reference - new)
    return torch.exp(difference) - difference - 1


def estimate(new: Tensor, reference: Tensor, kind: KLEstimator, limit: float | None = None) -> Tensor:
    """The estimate that the settings name; `limit`: largest value of k3, beyond which it has no gradient."""
    value = {"k1": k1, "k2": k2, "k3": k3}[kind[:2]](new, reference)
    if limit is not None and kind[:2] == "k3":
        value = value.clamp(max=limit)
    if kind.endswith("+"):  # the value of one estimator with the gradient of k2
        slope = k2(new, reference)
        value = value.detach() + slope - slope.detach()
    return value
