"""Confidence intervals of a mean over tasks: closed form and bootstrap. Pure.

Always true:
- Samples of one task are not independent: they share its difficulty. So the unit of every interval is the task: each task
  gives one number, and tasks are what varies.
- Every task counts equally, however many of its samples have a result. Where tasks of a known difficulty were played more
  often than others, each stands for as many as its stratum has (`strata`), so that the mean is that of all tasks.
- Equal input gives equal output, to the bit: the bootstrap draws from a generator that is seeded by its caller.

Shares of one sample of tasks have the test of `share_test`, for both intervals; what else there is has a t interval, or
percentiles of resampled means. `docs/evaluation.md` says how often they cover.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

from rollwright.evaluation.distributions import NORMAL, t_quantile
from rollwright.evaluation.share_test import bootstrap_share_interval, share_interval

CONFIDENCE = 0.95

BOOTSTRAP_DRAWS = 2000
"""Resamples of a bootstrap: the Monte Carlo error of a 2.5 % quantile is then about 0.35 points of probability."""

BOOTSTRAP_WORK = 4_000_000
"""Values drawn by one bootstrap at most, about a second. Many tasks get fewer resamples, and need fewer: their
distribution is smooth."""

PSEUDO_TASKS = 0.25
"""Tasks with the value 0, and as many with 1, that a bootstrap of strata of shares draws beside those that were played. Without
them, resamples of few successes contain none of the spread that further tasks would show."""

PRIOR_TASKS = 0.5
"""Weight of the largest possible variance among the tasks of a stratum that tell its variance."""

LEAST_FREEDOM = 1.0


@dataclass(frozen=True)
class ConfidenceInterval:
    """A confidence interval of a mean over tasks."""

    low: float
    high: float
    confidence: float = CONFIDENCE

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean of one value for each task; `None` for fewer than two."""
    count = len(values)
    if count < 2:
        return None
    return math.sqrt(_squares(values) / (count - 1) / count)


def _squares(values: Sequence[float]) -> float:
    middle = mean(values)
    return math.fsum((each - middle) ** 2 for each in values)


@dataclass(frozen=True)
class TaskValues:
    """One value for each task that has a result, and what is known beside it."""

    values: Sequence[float]
    counts: Sequence[tuple[int, int]] | None = None
    """Solved samples and samples of each task, if the values are their quotients; `None`: they are something else."""
    strata: Sequence[int] | None = None
    """The stratum of each task; `None`: all tasks were equally likely to be played."""
    totals: Mapping[int, int] | None = None
    """Tasks in each stratum, played or not."""

    @cached_property
    def _parts(self) -> "list[_Part]":
        """Strata in their order, with enough tasks each to know their spread: others are joined with their neighbours."""
        if self.strata is None or self.totals is None:
            return [_Part(list(self.values), 1.0)]
        values: dict[int, list[float]] = {each: [] for each in sorted(self.totals) if self.totals[each]}
        for each, stratum in zip(self.values, self.strata, strict=True):
            values[stratum].append(each)
        joined: list[tuple[list[float], int]] = []
        for stratum, own in values.items():
            if joined and (len(own) < 2 or len(joined[-1][0]) < 2):
                before, total = joined.pop()
                joined.append((before + own, total + self.totals[stratum]))
            else:
                joined.append((own, self.totals[stratum]))
        if len(joined) > 1 and len(joined[-1][0]) < 2:
            (before, total), (own, last) = joined[-2:]
            joined[-2:] = [(before + own, total + last)]
        everything = sum(total for _, total in joined)
        return [_Part(own, total / everything) for own, total in joined]

    @property
    def planned(self) -> int:
        """Tasks that the strata have together."""
        return len(self.values) if self.totals is None else sum(self.totals.values())

    @property
    def mean(self) -> float:
        parts = self._parts
        if len(parts) == 1:
            return mean(self.values)
        return math.fsum(part.weight * mean(part.values) for part in parts)

    @property
    def error(self) -> float | None:
        """Standard error of the mean; `None` for fewer than two tasks."""
        if len(self._parts) == 1:
            return standard_error(self.values)
        return math.sqrt(self._variance(share=False)[0])

    def _variance(self, *, share: bool) -> tuple[float, float]:
        """Variance of a mean over strata, and its degrees of freedom.

        The tasks themselves are drawn from more of their kind, so strata vary beside the tasks in them. `share`: a stratum
        whose tasks all agree is not believed to have no spread: half a task with the largest possible one is added.
        """
        middle, planned = self.mean, self.planned
        variance, uncertain, noise = 0.0, 0.0, 0.0
        between = math.fsum(part.weight * (mean(part.values) - middle) ** 2 for part in self._parts)
        for part in self._parts:
            count, squares, freedom = len(part.values), _squares(part.values), len(part.values) - 1.0
            if share:
                near = (mean(part.values) * count + middle) / (count + 1)
                squares, freedom = squares + PRIOR_TASKS * near * (1 - near), freedom + PRIOR_TASKS
            own = squares / freedom / count
            variance += part.weight**2 * own
            uncertain += (part.weight**2 * own) ** 2 / freedom
            noise += part.weight * (1 - part.weight) * own
        variance += max(0.0, between - noise) / planned
        return variance, variance**2 / uncertain if uncertain else math.inf

    def interval(self, *, share: bool, confidence: float = CONFIDENCE) -> ConfidenceInterval | None:
        """Closed-form interval of the mean; `None` for fewer than two tasks, which say nothing of their spread.

        `share`: the values are shares from 0 to 1, and so is the interval.
        """
        if len(self.values) < 2:
            return None
        if len(self._parts) > 1:
            variance, freedom = self._variance(share=share)
            quantile = t_quantile((1 + confidence) / 2, max(LEAST_FREEDOM, freedom))
            if not share:
                return _around(self.mean, quantile * math.sqrt(variance), confidence)
            spread = self.mean * (1 - self.mean)
            size = spread / variance if spread > 0 and variance > 0 else len(self.values)
            return _wilson(self.mean, size, quantile, confidence)
        if not share:
            error = standard_error(self.values)
            assert error is not None
            quantile = t_quantile((1 + confidence) / 2, len(self.values) - 1)
            return _around(self.mean, quantile * error, confidence)
        return ConfidenceInterval(*share_interval(self.values, self.counts, confidence), confidence)

    def bootstrap(
        self,
        seed: int,
        *,
        share: bool = False,
        confidence: float = CONFIDENCE,
        draws: int = BOOTSTRAP_DRAWS,
    ) -> ConfidenceInterval | None:
        """Interval of the mean from resampled tasks; `None` for fewer than two.

        A share has the test of the closed form, with a critical level from the resamples. Others have percentiles of resampled
        means, moved outwards as far as Student's t exceeds the normal distribution, because these means spread too little with
        few tasks (Hesterberg's expanded percentiles).
        """
        count = len(self.values)
        if count < 2:
            return None
        draws = max(200, min(draws, BOOTSTRAP_WORK // count))
        if share and len(self._parts) == 1:
            bounds = bootstrap_share_interval(self.values, self.counts, confidence, seed, draws)
            return ConfidenceInterval(*bounds, confidence)
        random = Random(seed)
        pools = [_Pool(part, PSEUDO_TASKS / len(self._parts) if share else 0.0) for part in self._parts]
        means = sorted(_resample(pools, self.planned, random) for _ in range(draws))
        quantile = t_quantile((1 + confidence) / 2, count - 1) * math.sqrt(count / (count - 1))
        tail = NORMAL.cdf(-quantile)
        return ConfidenceInterval(_percentile(means, tail), _percentile(means, 1 - tail), confidence)


@dataclass(frozen=True)
class _Part:
    """Strata that are judged together."""

    values: list[float]
    weight: float
    """Share of all tasks."""


class _Pool:
    """What resamples of a part are drawn from."""

    def __init__(self, part: _Part, pseudo: float) -> None:
        self.count = len(part.values)
        self.share = part.weight
        self._values = [*part.values, 0.0, 1.0] if pseudo else part.values
        self._bounds = None
        if pseudo:
            self._bounds = [*range(1, self.count + 1), self.count + pseudo, self.count + 2 * pseudo]

    def draw(self, random: Random) -> float:
        drawn = random.choices(self._values, cum_weights=self._bounds, k=self.count)
        return math.fsum(drawn) / self.count


def _resample(pools: Sequence[_Pool], planned: int, random: Random) -> float:
    if len(pools) == 1:
        return pools[0].draw(random)
    sizes = [0] * len(pools)  # another set of tasks would have other shares of each difficulty
    for place in random.choices(range(len(pools)), [each.share for each in pools], k=planned):
        sizes[place] += 1
    return math.fsum(size * pool.draw(random) for size, pool in zip(sizes, pools, strict=True)) / planned


def task_values(
    scores: Sequence[Sequence[float]],
    strata: Sequence[int],
    totals: Mapping[int, int] | None,
    *,
    share: bool,
) -> TaskValues:
    """The mean score of each task; with the counts of solved samples, if all scores are 0 or 1."""
    counts = None
    if share and all(each in (0.0, 1.0) for samples in scores for each in samples):
        counts = [(round(sum(samples)), len(samples)) for samples in scores]
    values = [mean(samples) for samples in scores]
    return TaskValues(values, counts, None if totals is None else strata, totals)


def closed_form(
    values: Sequence[float],
    *,
    share: bool,
    counts: Sequence[tuple[int, int]] | None = None,
    confidence: float = CONFIDENCE,
) -> ConfidenceInterval | None:
    """Interval of the mean of one value for each task; see `TaskValues`."""
    return TaskValues(values, counts).interval(share=share, confidence=confidence)


def bootstrap(
    values: Sequence[float],
    seed: int,
    *,
    share: bool = False,
    counts: Sequence[tuple[int, int]] | None = None,
    confidence: float = CONFIDENCE,
    draws: int = BOOTSTRAP_DRAWS,
) -> ConfidenceInterval | None:
    """Interval of the mean from resampled tasks; see `TaskValues`."""
    return TaskValues(values, counts).bootstrap(seed, share=share, confidence=confidence, draws=draws)


def _around(middle: float, half: float, confidence: float) -> ConfidenceInterval:
    return ConfidenceInterval(middle - half, middle + half, confidence)


def _wilson(middle: float, size: float, quantile: float, confidence: float) -> ConfidenceInterval:
    """Wilson's interval of a share, of so many independent tasks."""
    pull = quantile * quantile / size
    centre = (middle + pull / 2) / (1 + pull)
    spread = max(0.0, middle * (1 - middle)) / size + pull / (4 * size)
    half = quantile / (1 + pull) * math.sqrt(spread)
    return ConfidenceInterval(max(0.0, centre - half), min(1.0, centre + half), confidence)


def _percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
