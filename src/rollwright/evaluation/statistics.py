"""Statistics of an evaluation: pass@k, majority@k, and paired comparison. Pure.

Always true:
- The unit of every test is the task, as in `intervals`.
- `pass_at_k` and `majority_at_k` are exact: quotients of integers, rounded once.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from rollwright.evaluation.distributions import t_quantile, t_two_sided
from rollwright.evaluation.intervals import CONFIDENCE, ConfidenceInterval, standard_error
from rollwright.evaluation.permutation import permutation_test

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
class PairedComparison:
    """Two results on the same tasks: the mean difference, its interval, and a test of no difference."""

    tasks: int
    difference: float
    """Second minus first, mean over tasks."""
    interval: ConfidenceInterval | None
    p_value: float | None
    """Probability of a difference at least as large if both were equally good; `None` for fewer than two tasks."""
    test: str
    """`permutation` of samples within tasks, or, where only the mean of each task is known, `sign-flip` or `t`."""
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
    samples: tuple[Mapping[Hashable, Sequence[float]], Mapping[Hashable, Sequence[float]]] | None = None,
    weights: Mapping[Hashable, float] | None = None,
    confidence: float = CONFIDENCE,
) -> PairedComparison:
    """Compares the values of tasks that both have.

    `samples`: the scores that the values of each are means of. `weights`: how many tasks each of them stands for, where some
    were more likely to be played than others.
    """
    shared = [task for task in first if task in second]
    if not shared:
        raise ValueError("there is no task that both have results for")
    before, after = [first[task] for task in shared], [second[task] for task in shared]
    differences = [b - a for a, b in zip(before, after, strict=True)]
    told = [1.0] * len(shared) if weights is None else [weights[task] for task in shared]
    found = weighted_difference(differences, told)
    p_value, test = paired_test(differences, told)
    apart = [standard_error(before), standard_error(after)]
    critical = math.inf
    if samples is not None and len(shared) > 1:
        scores = [[each[task] for task in shared] for each in samples]
        permuted = permutation_test(scores[0], scores[1], told, 1 - confidence)
        p_value, test, critical = permuted.p_value, "permutation", permuted.critical
    elif len(shared) > 1:
        critical = t_quantile((1 + confidence) / 2, len(shared) - 1)
    interval = None
    if found.error is not None and math.isfinite(critical):
        half = critical * found.error
        interval = ConfidenceInterval(found.mean - half, found.mean + half, confidence)
    return PairedComparison(
        tasks=len(shared),
        difference=found.mean,
        interval=interval,
        p_value=p_value,
        test=test,
        better=sum(each > 0 for each in differences),
        worse=sum(each < 0 for each in differences),
        unpaired_error=None if apart[0] is None or apart[1] is None else math.hypot(apart[0], apart[1]),
        error=found.error,
    )


class WeightedMean(NamedTuple):
    """A mean, and its standard error; `None` for fewer than two values."""

    mean: float
    error: float | None


def weighted_difference(differences: Sequence[float], weights: Sequence[float]) -> WeightedMean:
    """Mean of differences that stand for so many tasks each."""
    total, count = math.fsum(weights), len(differences)
    middle = math.fsum(w * each for w, each in zip(weights, differences, strict=True)) / total
    if count < 2:
        return WeightedMean(middle, None)
    squares = math.fsum((w * (each - middle)) ** 2 for w, each in zip(weights, differences, strict=True))
    return WeightedMean(middle, math.sqrt(squares * count / (count - 1)) / total)


def paired_test(
    differences: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[float | None, str]:
    """Two-sided p-value of the hypothesis that differences are 0 on average, and the name of the test."""
    if len(differences) < 2:
        return None, "t"
    told = [1.0] * len(differences) if weights is None else weights
    unequal = [w * each for w, each in zip(told, differences, strict=True) if each != 0]
    if len(unequal) <= EXACT_SIGNS:
        return _sign_flip(unequal), "sign-flip"
    found = weighted_difference(differences, told)
    assert found.error is not None
    return t_two_sided(found.mean / found.error if found.error else math.inf, len(differences) - 1), "t"


def _sign_flip(differences: Sequence[float]) -> float:
    """Share of all sign patterns whose sum is at least as far from 0. If both are equally good, every pattern was equally
    likely, so the level is exact whatever the distribution."""
    sums = [0.0]
    for each in differences:
        sums = [total + signed for total in sums for signed in (each, -each)]
    # Means of k/n are not exact in binary: sums that differ by rounding alone count as equal.
    least = abs(math.fsum(differences)) * (1 - 1e-12)
    return sum(abs(total) >= least for total in sums) / len(sums)
