"""Distributions of completion lengths, and the filler text of simulated completions.

A distribution is a small frozen object with a quantile function, which maps one keyed draw in [0, 1) to a length, so a
length depends on its key alone.
"""

from dataclasses import dataclass
from math import exp, log
from statistics import NormalDist
from typing import Protocol

from rollwright.errors import ConfigError
from rollwright.trajectory import TokenIds, token_ids

_FILLER = "let me think about it. "
"""Holds no tag and no action of any environment's format, so an environment reads only the answer behind it."""

_FILLER_IDS = token_ids(list(_FILLER.encode()))

_STANDARD = NormalDist()

_SMALLEST = 2.0**-54
"""A draw may be exactly 0, whose quantile under a normal distribution is minus infinity."""


class Lengths(Protocol):
    """A distribution of whole numbers of tokens, each at least 1."""

    def quantile(self, draw: float) -> int:
        """The length below which the share `draw` of all lengths lies; `draw` is in [0, 1)."""
        ...


@dataclass(frozen=True)
class FixedLength:
    """The same length always."""

    tokens: int

    def __post_init__(self) -> None:
        _check_order("tokens", 1, self.tokens)

    def quantile(self, draw: float) -> int:
        return self.tokens


@dataclass(frozen=True)
class UniformLength:
    """Every length from `shortest` to `longest`, both included, with equal probability."""

    shortest: int
    longest: int

    def __post_init__(self) -> None:
        _check_order("shortest", 1, self.shortest)
        _check_order("longest", self.shortest, self.longest)

    def quantile(self, draw: float) -> int:
        return self.shortest + int(draw * (self.longest - self.shortest + 1))


@dataclass(frozen=True)
class LogNormalLength:
    """Heavy-tailed like real completions: few very long ones make most of the work."""

    mean: float
    """Mean before lengths are cut at `longest`."""
    sigma: float = 1.0
    """Standard deviation of the logarithm; at 1 the 99th percentile is six times the mean."""
    longest: int = 1 << 20

    def __post_init__(self) -> None:
        if not self.mean > 0 or not self.sigma >= 0:
            raise ConfigError(f"mean {self.mean}, sigma {self.sigma}: accepted are mean > 0 and sigma >= 0")
        _check_order("longest", 1, self.longest)

    def quantile(self, draw: float) -> int:
        return min(self.longest, max(1, round(lognormal(self.mean, self.sigma, draw))))


def lognormal(mean: float, sigma: float, draw: float) -> float:
    """The quantile of a lognormal distribution with this mean, for lengths and for seconds."""
    center = log(mean) - sigma**2 / 2
    return exp(center + sigma * _STANDARD.inv_cdf(max(draw, _SMALLEST)))


def filler_text(length: int) -> str:
    """`length` characters, each one byte of UTF-8."""
    return (_FILLER * (length // len(_FILLER) + 1))[:length]


def filler_ids(length: int) -> TokenIds:
    """The same text as ids of the `BytesRenderer`."""
    return (_FILLER_IDS * (length // len(_FILLER_IDS) + 1))[:length]


def _check_order(name: str, least: int, value: int) -> None:
    if value < least:
        raise ConfigError(f"{name}: {value} is too small; accepted: {least} or more")
