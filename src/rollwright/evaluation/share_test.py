"""Tests of a mean share over tasks, and the interval of all means that are not rejected. Pure.

A share is what an evaluation solves of a task: a number from 0 to 1. With a mean μ and a correlation ρ of two samples of a task,
the value of a task has the variance μ(1 - μ)·(ρ + (1 - ρ)/samples). ρ is hardly known from few tasks, and the variance among
the tasks that were played is hardly known where few of them were solved at all. So a test of μ does both:

- Each ρ between 0 and 1 has a weight: how likely it makes the observed counts (beta-binomial, Jeffreys' prior). It says what
  moments the value of a task has if μ is true.
- The variance among the played tasks corrects the variance that ρ says, with the degrees of freedom that the fourth moment
  gives it, against `MODEL_FREEDOM` for ρ. So with many tasks the observed variance counts alone, whatever the distribution of
  difficulty is; with few, it counts as much as it can tell. The part of it that follows from the mean itself is taken out first
  (a control variate), because both are large together where success is rare.
- The mean then has a t distribution, bent by the third moment (Wilson and Hilferty's cube root), because few rare successes make
  a lopsided one.
- Both tails count. Where the distribution is nearly symmetric, the other tail is as large as this one; where it is lopsided,
  it is what lies at least as far away on the other side: often nothing, and then a tail of 5 % and not of 2.5 % is rejected.

Without counts (pass@k, majority@k) values are taken as drawn from a beta distribution, and the weight of each variance is how
likely it makes the observed one.

Every array has one row for each of many sets of tasks: resamples of a bootstrap, or simulated evaluations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MODEL_FREEDOM = 3.0
"""Degrees of freedom of the variance that follows from ρ. With 2 to 8, simulated coverage differs by less than 0.3 points; with
none, few rare successes cover 60 to 90 %, and with many, tasks of two kinds (easy and hard) cover 93 %."""

TEST_FREEDOM = 12.0
"""Degrees of freedom of the t distribution beside those of the observed variance. More than `MODEL_FREEDOM`, because how little is
known of ρ is in its weights already."""

CORRELATIONS = 10
"""Values of ρ that a test is averaged over, dense near 0 and 1; twice as many change the coverage by less than 0.001."""

LOPSIDED = 0.2
"""Skewness of the mean at which the other tail counts half as equal and half as what is as far away."""

LARGEST_SKEWNESS = 2.5
"""The cube root is close to a gamma distribution up to here."""

LEVEL_RANGE = 1.5
"""Factor by which a bootstrap may move the critical level."""

_SURE = 1e9
"""Degrees of freedom of a variance that follows from the mean."""

_POINTS, _ROUNDS = 32, 9
"""Means that are tested at once for a bound, and how often: it is known to 1e-13."""


class ShareTest:
    """Tests of the mean, for one or many sets of as many tasks."""

    def __init__(self, tasks: int, mean: "Floats", variance: "Floats", counts: "CountTables | None") -> None:
        """`mean`, `variance`: of the values of the tasks (divided by tasks - 1), a row for each set."""
        import numpy as np  # an evaluation needs it, not everybody who imports this package

        self._np: Any = np
        self._tasks = tasks
        self._mean = mean[:, None]
        self._variance = variance[:, None]
        self._counts = counts
        places = (np.arange(CORRELATIONS) + 0.5) / CORRELATIONS
        self._rho = np.sin(places * np.pi / 2)[None] ** 2

    @classmethod
    def of_values(cls, values: "Floats", counts: "CountTables | None" = None) -> "ShareTest":
        """`values`: a row of tasks for each set."""
        return cls(values.shape[1], values.mean(1), values.var(1, ddof=1), counts)

    @classmethod
    def of_counts(cls, solved: "NDArray[np.int64]", samples: "NDArray[np.int64]") -> "ShareTest":
        """Solved samples and samples of each task, a row of tasks for each set."""
        return cls.of_values(solved / samples, CountTables.of_counts(solved, samples))

    def p_values(self, share: "float | Floats") -> "Floats":
        """Two-sided p-value of each set, if the true mean is `share`; or, of one set, for each of many means."""
        np = self._np
        mu = np.reshape(np.asarray(share, float), (-1, 1))
        moments = self._moments(mu)
        variance, third = moments.variance, moments.third
        apart = self._mean - mu
        rest = np.maximum(moments.fourth - moments.squares - third**2 / variance, 0.0)
        follows = np.clip(
            1 - rest / (2 * variance**2), 0.0, 1.0
        )  # 1: two values only; 0: a normal distribution
        seen = self._variance * (1 - follows / self._tasks) + follows * apart**2 - third / variance * apart
        seen = np.maximum(seen, 0.0)
        freedom = (
            2 * (self._tasks - 1) * variance**2 / np.maximum(rest, 2 * self._tasks / _SURE * variance**2)
        )
        known = freedom / (freedom + MODEL_FREEDOM)
        believed = (1 - known) * variance + known * seen
        distance = np.abs(apart) / np.sqrt(believed / self._tasks)
        skewness = third / variance**1.5 / math.sqrt(self._tasks) * np.sign(apart)
        freedom = freedom + TEST_FREEDOM
        here = self._tail(self._bend(distance, skewness), freedom)
        there = self._tail(self._bend(distance, -skewness), freedom)
        even = 1 / (1 + (skewness / LOPSIDED) ** 4)
        weights = self._weights(mu, moments, seen)
        found: Floats = (weights * (here + even * here + (1 - even) * there)).sum(1)
        return found

    def interval(self, level: float) -> tuple[float, float]:
        """The lowest and the highest mean whose p-value is at least `level`, of the only set."""
        middle = float(self._mean[0, 0])
        return self._bound(middle, 0.0, level), self._bound(middle, 1.0, level)

    def _bound(self, inner: float, outer: float, level: float) -> float:
        """Where the means between an accepted one and a rejected one begin to be rejected."""
        np = self._np
        for _ in range(_ROUNDS):
            points = np.linspace(inner, outer, _POINTS + 1)[1:]
            rejected = self.p_values(np.clip(points, 1e-12, 1 - 1e-12)) < level
            if not rejected.any():
                return outer
            place = int(rejected.argmax())
            inner, outer = (inner if place == 0 else float(points[place - 1])), float(points[place])
        return (inner + outer) / 2

    def _moments(self, mu: "Floats") -> "_Moments":
        """Central moments of the value of a task, mean over tasks, for each ρ."""
        rho = self._rho
        h1, h2, h3 = self._counts.inverse if self._counts is not None else (0.0, 0.0, 0.0)
        # Moments of a beta distribution, then those of solved shares by the factorial moments of counts.
        q2 = mu * (mu * (1 - rho) + rho)
        q3 = q2 * (mu * (1 - rho) + 2 * rho) / (1 + rho)
        q4 = q3 * (mu * (1 - rho) + 3 * rho) / (1 + 2 * rho)
        second = (1 - h1) * q2 + h1 * mu
        third = (1 - 3 * h1 + 2 * h2) * q3 + 3 * (h1 - h2) * q2 + h2 * mu
        fourth = (1 - 6 * h1 + 11 * h2 - 6 * h3) * q4 + 6 * (h1 - 3 * h2 + 2 * h3) * q3
        fourth = fourth + 7 * (h2 - h3) * q2 + h3 * mu
        return _Moments(
            second - mu**2,
            (mu * (1 - mu)) ** 2 * (rho**2 + 2 * rho * (1 - rho) * h1 + (1 - rho) ** 2 * h2),
            third - 3 * mu * second + 2 * mu**3,
            fourth - 4 * mu * third + 6 * mu**2 * second - 3 * mu**4,
        )

    def _weights(self, mu: "Floats", moments: "_Moments", seen: "Floats") -> "Floats":
        """How likely each ρ makes what was observed; the sum over ρ is 1."""
        np = self._np
        if self._counts is not None:
            told = self._counts.log_likelihood(mu, self._rho)
        else:
            variance = moments.variance
            rest = np.maximum(
                moments.fourth - moments.squares - moments.third**2 / variance, 1e-6 * variance**2
            )
            half = (self._tasks - 1) * variance**2 / rest
            ratio = np.maximum(seen, 1e-9) / variance
            log_gamma = np.frompyfunc(math.lgamma, 1, 1)(half).astype(float)
            told = half * np.log(half) - log_gamma + half * np.log(ratio) - half * ratio
        told = np.exp(told - told.max(1, keepdims=True))
        found: Floats = told / told.sum(1, keepdims=True)
        return found

    def _bend(self, distance: "Floats", skewness: "Floats") -> "Floats":
        """The normal deviate of a standardized gamma variable that is so far above its mean."""
        np = self._np
        skewness = np.clip(skewness, -LARGEST_SKEWNESS, LARGEST_SKEWNESS)
        skewness = np.where(np.abs(skewness) < 1e-6, 1e-6, skewness)
        base = 1 + skewness * distance / 2
        bent = 6 / skewness * (np.cbrt(np.maximum(base, 0.0)) - 1) + skewness / 6
        found: Floats = np.where(base <= 0, 8.0, bent)  # beyond the end of a bounded tail
        return found

    def _tail(self, deviate: "Floats", freedom: "Floats") -> "Floats":
        """Probability that a t distributed value is larger (Wallace's normal approximation)."""
        np = self._np
        normal = np.sqrt(freedom * np.log1p(deviate**2 / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
        normal = np.sign(deviate) * normal / math.sqrt(2)
        found: Floats = np.frompyfunc(math.erfc, 1, 1)(normal).astype(float) / 2
        return found


@dataclass(frozen=True)
class _Moments:
    """Of the value of a task, mean over tasks."""

    variance: Any
    squares: Any
    """Mean over tasks of the squared variance, which depends on their samples."""
    third: Any
    fourth: Any


@dataclass(frozen=True)
class CountTables:
    """What a beta-binomial likelihood depends on: how many tasks have more than i solved, unsolved, and all samples. With a mean
    μ and a correlation ρ, a task solves k of n with the probability
    Π_{i<k}(μ(1-ρ)+iρ) · Π_{i<n-k}((1-μ)(1-ρ)+iρ) / Π_{i<n}(1-ρ+iρ)."""

    solved: Any
    missed: Any
    drawn: Any
    inverse: tuple[Any, Any, Any]
    """Means of 1/samples, 1/samples² and 1/samples³."""

    @classmethod
    def of_counts(cls, solved: "NDArray[np.int64]", samples: "NDArray[np.int64]") -> "CountTables":
        import numpy as np

        most = int(samples.max())

        def exceeding(numbers: "NDArray[np.int64]") -> "Floats":
            return np.stack([(numbers > place).sum(1) for place in range(most)], 1).astype(float)

        inverse = tuple((1.0 / samples.astype(float) ** power).mean(1, keepdims=True) for power in (1, 2, 3))
        return cls(exceeding(solved), exceeding(samples - solved), exceeding(samples), inverse)

    def log_likelihood(self, mu: "Floats", rho: "Floats") -> "Floats":
        """Of the counts of each set, for each ρ."""
        import numpy as np

        found: Any = 0.0
        for place in range(self.drawn.shape[1]):
            found = found + self.solved[:, [place]] * np.log(mu * (1 - rho) + place * rho)
            found = found + self.missed[:, [place]] * np.log((1 - mu) * (1 - rho) + place * rho)
            found = found - self.drawn[:, [place]] * np.log(1 - rho + place * rho)
        told: Floats = found
        return told


def share_interval(
    values: Sequence[float], counts: Sequence[tuple[int, int]] | None, confidence: float
) -> tuple[float, float]:
    """Bounds of the mean of one value for each task."""
    return _test_of(values, counts).interval(1 - confidence)


def bootstrap_share_interval(
    values: Sequence[float],
    counts: Sequence[tuple[int, int]] | None,
    confidence: float,
    seed: int,
    draws: int,
) -> tuple[float, float]:
    """Bounds of the mean by the same test, whose critical level is taken from resampled tasks."""
    level = bootstrap_level(values, counts, 1 - confidence, seed, draws)
    return _test_of(values, counts).interval(level)


def bootstrap_level(values: Any, counts: Any, level: float, seed: int, draws: int) -> float:
    """The p-value that so many resamples fall below whose mean is known, which is that of the tasks. It stays within a factor of
    `LEVEL_RANGE` of the level, because a few tasks, or tasks of a few kinds, resample badly."""
    import numpy as np

    shares = np.asarray(values)
    middle = float(shares.mean())
    if not 0 < middle < 1:
        return level
    taken = np.random.default_rng(seed).integers(0, len(shares), (draws, len(shares)))
    if counts is None:
        test = ShareTest.of_values(shares[taken])
    else:
        told = np.asarray(counts)
        test = ShareTest.of_counts(told[taken, 0], told[taken, 1])
    found = float(np.quantile(test.p_values(middle), level))
    return min(LEVEL_RANGE * level, max(level / LEVEL_RANGE, found))


def _test_of(values: Sequence[float], counts: Sequence[tuple[int, int]] | None) -> ShareTest:
    import numpy as np

    if counts is None:
        return ShareTest.of_values(np.array(values)[None])
    told = np.array(counts)
    return ShareTest.of_counts(told[None, :, 0], told[None, :, 1])
