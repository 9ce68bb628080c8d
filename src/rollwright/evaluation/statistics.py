"""Statistics of an evaluation: pass@k, majority@k, intervals that respect tasks, and paired comparison. Pure.

Always true:
- Samples of one task are not independent: they share its difficulty. So the unit of every interval and test is the task:
  each task gives one number (its mean, its pass@k), and tasks are what varies.
- Every task counts equally, however many of its samples succeeded in being played.
- `pass_at_k` and `majority_at_k` are exact: quotients of integers, rounded once.
- Equal input gives equal output, to the bit: the bootstrap draws from a generator that is seeded by its caller.

Choice of the closed form, by simulation (`tests/evaluation/test_statistics.py`): for shares, a t interval around the mean
undercovers near 0 and 1 and with few tasks (59 % instead of 95 % with 12 tasks of skill 0.03). Wilson's interval with the
number of independent tasks that would give the observed variance, and the t quantile in place of the normal one, keeps its
level from 40 tasks on, for skills from 0.1 to 0.9; with fewer it is rather too wide than too narrow.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from rollwright.evaluation.distributions import NORMAL, t_quantile, t_two_sided

CONFIDENCE = 0.95

BOOTSTRAP_DRAWS = 2000
"""Resamples of a bootstrap: the Monte Carlo error of a 2.5 % quantile is then about 0.35 points of probability."""

BOOTSTRAP_WORK = 4_000_000
"""Values drawn by one bootstrap at most, about a second. Many tasks get fewer resamples, and need fewer: their
distribution is smooth."""

EXACT_SIGNS = 14
"""Differences up to which all 2^n sign patterns are enumerated; with more, Student's t keeps its level."""


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Probability that at least one of k samples solves the task, drawn without return from `samples` of which `solved` do."""
    if not 0 <= solved <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {solved} solved in {samples} samples is not defined")
    ways = math.comb(samples, k)
    return (ways - math.comb(samples - solved, k)) / ways


def majority_at_k(votes: Sequence[tuple[Hashable, float]], k: int) -> float:
    """Expected score of the most frequent answer among k votes, drawn without return; equally frequent answers share it.

    `votes`: answer and score of each sample. Equal answers normally score equally; otherwise their mean counts.
    """
    if not 1 <= k <= len(votes):
        raise ValueError(f"majority@{k} of {len(votes)} samples is not defined")
    counts = Counter(answer for answer, _ in votes)
    scores: dict[Hashable, list[float]] = {}
    for answer, score in votes:
        scores.setdefault(answer, []).append(score)
    total = Fraction(0)
    wins: dict[int, Fraction] = {}
    for answer, count in counts.items():
        worth = sum(map(Fraction, scores[answer]), Fraction(0)) / count
        if not worth:
            continue
        if count not in wins:  # answers of equal frequency win equally often
            others = list(counts.values())
            others.remove(count)
            wins[count] = _win_share(count, others, k)
        total += worth * wins[count]
    return float(total)


def _win_share(count: int, others: Sequence[int], k: int) -> Fraction:
    """Probability that an answer given `count` times wins a vote of k; a tie of t answers counts 1/t."""
    won = Fraction(0)
    for own in range(1, min(count, k) + 1):
        # ways[(votes, ties)]: ways to draw so many votes from the other answers, each at most `own` times.
        ways: dict[tuple[int, int], int] = {(0, 0): 1}
        for other in others:
            reached: dict[tuple[int, int], int] = {}
            for (votes, ties), number in ways.items():
                for drawn in range(min(other, own, k - own - votes) + 1):
                    key = votes + drawn, ties + (drawn == own)
                    reached[key] = reached.get(key, 0) + number * math.comb(other, drawn)
            ways = reached
        for (votes, ties), number in ways.items():
            if votes == k - own:
                won += Fraction(math.comb(count, own) * number, ties + 1)
    return won / math.comb(count + sum(others), k)


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
    middle = mean(values)
    return math.sqrt(math.fsum((each - middle) ** 2 for each in values) / (count - 1) / count)


def closed_form(
    values: Sequence[float], *, share: bool, confidence: float = CONFIDENCE
) -> ConfidenceInterval | None:
    """ConfidenceInterval of the mean of one value for each task; `None` for fewer than two tasks, which say nothing of their spread.

    `share`: the values are shares from 0 to 1, and so is the interval.
    """
    error = standard_error(values)
    if error is None:
        return None
    middle = mean(values)
    quantile = t_quantile((1 + confidence) / 2, len(values) - 1)
    if not share:
        return ConfidenceInterval(middle - quantile * error, middle + quantile * error, confidence)
    size = _independent_tasks(len(values), middle, error)
    spread = max(0.0, middle * (1 - middle))
    pull = quantile * quantile / size
    centre = (middle + pull / 2) / (1 + pull)
    half = quantile / (1 + pull) * math.sqrt(spread / size + pull / (4 * size))
    return ConfidenceInterval(max(0.0, centre - half), min(1.0, centre + half), confidence)


def _independent_tasks(tasks: int, middle: float, error: float) -> float:
    """How many independent yes/no tasks would give the mean this standard error.

    Where few tasks are unlike the others (a skill near 0 or 1), their variance is itself hardly known and mostly too
    small. So the largest variance possible at this mean is mixed in, with the weight of one task divided by the number of
    tasks that tell the variance; beyond a dozen of these it changes nothing.
    """
    largest = middle * (1 - middle)
    if error <= 0 or largest <= 0:
        return tasks  # all 0, all 1 or all equal: the tasks themselves are counted, as in Wilson's interval
    weight = 1 / (tasks * largest)
    variance = (error * error * tasks * (tasks - 1) + largest * weight) / (tasks - 1 + weight)
    return largest * tasks / variance


def bootstrap(
    values: Sequence[float], seed: int, *, confidence: float = CONFIDENCE, draws: int = BOOTSTRAP_DRAWS
) -> ConfidenceInterval | None:
    """ConfidenceInterval of the mean from resampled tasks; `None` for fewer than two.

    Percentiles are moved outwards as far as Student's t exceeds the normal distribution, because resampled means spread
    too little with few tasks (Hesterberg's expanded percentiles).
    """
    count = len(values)
    if count < 2:
        return None
    draws = max(200, min(draws, BOOTSTRAP_WORK // count))
    random = Random(seed)
    means = sorted(math.fsum(random.choices(values, k=count)) / count for _ in range(draws))
    quantile = t_quantile((1 + confidence) / 2, count - 1) * math.sqrt(count / (count - 1))
    tail = NORMAL.cdf(-quantile)
    return ConfidenceInterval(_percentile(means, tail), _percentile(means, 1 - tail), confidence)


def _percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True)
class PairedComparison:
    """Two results on the same tasks: the mean difference, its interval, and a test of no difference."""

    tasks: int
    difference: float
    """Second minus first, mean over tasks."""
    interval: ConfidenceInterval | None
    p_value: float | None
    """Probability of a difference at least as large if both were equally good; `None` for fewer than two tasks."""
    test: str
    """`sign-flip` (exact) or `t`."""
    better: int
    """Tasks on which the second is better."""
    worse: int
    unpaired_error: float | None
    """Standard error if the pairing were ignored: what sharing the tasks has saved."""
    error: float | None
    """Standard error of the difference."""


def compare_paired(
    first: Mapping[Hashable, float],
    second: Mapping[Hashable, float],
    *,
    confidence: float = CONFIDENCE,
) -> PairedComparison:
    """Compares the values of tasks that both have."""
    shared = [task for task in first if task in second]
    if not shared:
        raise ValueError("there is no task that both have results for")
    before, after = [first[task] for task in shared], [second[task] for task in shared]
    differences = [b - a for a, b in zip(before, after, strict=True)]
    p_value, test = paired_test(differences)
    apart = [standard_error(before), standard_error(after)]
    return PairedComparison(
        tasks=len(shared),
        difference=mean(differences),
        interval=closed_form(differences, share=False, confidence=confidence),
        p_value=p_value,
        test=test,
        better=sum(each > 0 for each in differences),
        worse=sum(each < 0 for each in differences),
        unpaired_error=None if apart[0] is None or apart[1] is None else math.hypot(apart[0], apart[1]),
        error=standard_error(differences),
    )


def paired_test(differences: Sequence[float]) -> tuple[float | None, str]:
    """Two-sided p-value of the hypothesis that differences are 0 on average, and the name of the test."""
    if len(differences) < 2:
        return None, "t"
    unequal = [each for each in differences if each != 0]
    if len(unequal) <= EXACT_SIGNS:
        return _sign_flip(unequal), "sign-flip"
    error = standard_error(differences)
    assert error is not None
    return t_two_sided(mean(differences) / error if error else math.inf, len(differences) - 1), "t"


def _sign_flip(differences: Sequence[float]) -> float:
    """Share of all sign patterns whose sum is at least as far from 0. If both are equally good, every pattern was equally
    likely, so the level is exact whatever the distribution."""
    sums = [0.0]
    for each in differences:
        sums = [total + signed for total in sums for signed in (each, -each)]
    # Means of k/n are not exact in binary: sums that differ by rounding alone count as equal.
    least = abs(math.fsum(differences)) * (1 - 1e-12)
    return sum(abs(total) >= least for total in sums) / len(sums)
