"""Quantiles of Student's t distribution, and the critical value of repeated looks at growing data. Pure.

Always true: `t_quantile` agrees with tables to 1e-9; with many degrees of freedom it is the normal quantile.
`repeated_looks` is the constant of Pocock: the estimate of a mean, looked at after each of the given sizes, stays within
this many standard errors of the truth at *all* looks with probability `confidence`. So whichever look a rule stops at, the
interval of that look covers.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist

NORMAL = NormalDist()

_NORMAL_FROM = 1e7
"""Degrees of freedom from which t and normal quantiles agree to 1e-6 of a standard error."""

_GRID = 0.05
"""Standard errors between two points at which the density of a look is tabulated. A step of 0.01 changes the constant by
less than 1e-4."""


@lru_cache(maxsize=4096)
def t_quantile(probability: float, freedom: float) -> float:
    """The value below which a t distribution with `freedom` degrees of freedom has this probability."""
    if not 0 < probability < 1:
        raise ValueError(f"{probability} is not a probability between 0 and 1")
    if freedom >= _NORMAL_FROM:
        return NORMAL.inv_cdf(probability)
    if probability == 0.5:
        return 0.0
    if probability < 0.5:
        return -t_quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while _t_upper_tail(high, freedom) > 1 - probability:
        low, high = high, high * 2
    for _ in range(200):  # bisection to the last bit: a few microseconds, and cached
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if _t_upper_tail(middle, freedom) > 1 - probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_two_sided(statistic: float, freedom: float) -> float:
    """The probability that a t distributed value is at least as far from 0 as `statistic`."""
    if math.isinf(statistic):
        return 0.0
    return min(1.0, 2 * _t_upper_tail(abs(statistic), freedom))


def _t_upper_tail(value: float, freedom: float) -> float:
    return 0.5 * _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + value * value))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function, by its continued fraction (Lentz)."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, that of the other tail is quick
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    tiny = 1e-300
    c, d = 1.0, 1 / _off_zero(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 10_000):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _off_zero(1 + numerator * d, tiny)
            c = _off_zero(1 + numerator / c, tiny)
            fraction *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return front * fraction / a


def _off_zero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny


@lru_cache(maxsize=64)
def repeated_looks(sizes: Sequence[int], confidence: float) -> float:
    """Standard errors within which all looks stay together, with this probability. `sizes`: growing numbers of observations."""
    single = NORMAL.inv_cdf((1 + confidence) / 2)
    if len(sizes) < 2:
        return single
    low, high = single, NORMAL.inv_cdf(1 - (1 - confidence) / (2 * len(sizes)))
    for _ in range(20):
        middle = (low + high) / 2
        if _inside_at_all(sizes, middle) < confidence:
            low = middle
        else:
            high = middle
    return high


def _inside_at_all(sizes: Sequence[int], bound: float) -> float:
    """Probability that a sum of independent standard normal draws is within `bound` of its standard deviation at every
    size, by the recursion of Armitage, McPherson and Rowe over the density of those that were inside so far."""
    points = _points(bound * math.sqrt(sizes[0]), math.sqrt(sizes[0]))
    density = [NORMAL.pdf(each / math.sqrt(sizes[0])) / math.sqrt(sizes[0]) for each in points]
    step = points[1] - points[0]
    for before, size in pairwise(sizes):
        spread = math.sqrt(size - before)
        reached = _points(bound * math.sqrt(size), spread)
        weights = _simpson(len(points), step)
        inside = [weight * each for weight, each in zip(weights, density, strict=True)]
        density = [
            math.fsum(
                mass * NORMAL.pdf((there - here) / spread)
                for here, mass in zip(points, inside, strict=True)
                if abs(there - here) < 9 * spread
            )
            / spread
            for there in reached
        ]
        points, step = reached, reached[1] - reached[0]
    weights = _simpson(len(points), step)
    return math.fsum(weight * each for weight, each in zip(weights, density, strict=True))


def _points(edge: float, spread: float) -> list[float]:
    """An odd number of points from -edge to edge, fine enough for densities that change over `spread`."""
    intervals = 2 * max(8, math.ceil(edge / (spread * _GRID * 4)))
    return [-edge + 2 * edge * place / intervals for place in range(intervals + 1)]


def _simpson(count: int, step: float) -> list[float]:
    return [step / 3 * (1 if place in (0, count - 1) else 4 if place % 2 else 2) for place in range(count)]
