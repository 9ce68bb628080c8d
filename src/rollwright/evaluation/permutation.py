"""Paired test of two models by their samples: which of the two has sampled what is permuted within each task. Pure.

Always true:
- If the two are equally good on every task, its samples could as well have been the other one's, so every permutation was
  equally likely and the test keeps its level exactly: with few tasks, rare successes, and different numbers of samples, where
  differences are lopsided and a t test or a test of signs rejects up to half of the time.
- The statistic is the difference divided by its standard error over tasks. So with many tasks the test also keeps its level
  where the two differ from task to task and are equally good on average.
- The interval is what the same critical value leaves, so it contains 0 where the test does not reject.
- Equal input gives equal output: draws are seeded by the scores. (A seed for all would make the same error for all.)
"""

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

DRAWS = 9999
"""Permutations; with the observed one 10,000, so that p-values have four digits. Near 0.05 their error is 0.002."""

MOST_WORK = 10_000_000
"""Differences drawn at most, about a second; never fewer than a tenth of the permutations."""

_EQUAL = 1e-9
"""Statistics that differ by rounding alone are equal."""


class PermutationResult(NamedTuple):
    p_value: float
    critical: float
    """Standard errors that the difference has to exceed; infinite where so few tasks can reject nothing."""


def permutation_test(
    first: Sequence[Sequence[float]],
    second: Sequence[Sequence[float]],
    weights: Sequence[float],
    level: float,
) -> PermutationResult:
    """`first`, `second`: the scores of each task's samples. `weights`: how many tasks each stands for. `level`: of the
    critical value."""
    import numpy as np

    told = np.array(weights)
    observed = _mean_differences(first, second)
    (statistic,) = _statistics(observed[None], told)
    # Where all samples of a task are equal, every permutation has the difference 0.
    open_tasks = [place for place in range(len(first)) if len({*first[place], *second[place]}) > 1]
    random = np.random.default_rng(_seed(first, second))
    draws = max(DRAWS // 10, min(DRAWS, MOST_WORK // max(1, len(open_tasks))))
    drawn = np.zeros((draws, len(first)))
    for place in open_tasks:
        drawn[:, place] = _permute(first[place], second[place], draws, random)
    statistics = _statistics(drawn, told)
    reached = int((statistics >= statistic * (1 - _EQUAL)).sum())
    ordered = np.sort(np.append(statistics, statistic))
    return PermutationResult(
        (1 + reached) / (draws + 1), float(ordered[math.ceil((1 - level) * (draws + 1)) - 1])
    )


def _seed(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> int:
    told = repr([[list(each) for each in some] for some in (first, second)])
    return int.from_bytes(blake2b(told.encode(), digest_size=8).digest(), "big")


def _mean_differences(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> "Floats":
    import numpy as np

    pairs = zip(first, second, strict=True)
    return np.array([math.fsum(b) / len(b) - math.fsum(a) / len(a) for a, b in pairs])


def _permute(first: Sequence[float], second: Sequence[float], draws: int, random: Any) -> "Floats":
    """Differences of the two means, the samples of a task divided at random."""
    import numpy as np

    everything = np.array([*first, *second])
    before, after = len(first), len(second)
    values = np.unique(everything)
    if len(values) == 2:  # solved or not: only their number matters
        high = int((everything == values[1]).sum())
        mine = random.hypergeometric(high, len(everything) - high, after, draws)
        found: Floats = (values[1] - values[0]) * (mine / after - (high - mine) / before)
        return found
    shuffled = random.permuted(np.tile(everything, (draws, 1)), axis=1)
    return shuffled[:, before:].mean(1) - shuffled[:, :before].mean(1)  # type: ignore[no-any-return]


def _statistics(differences: "Floats", weights: "Floats") -> "Floats":
    """Distance of each row's mean from 0, in its standard errors."""
    import numpy as np

    count, total = len(weights), weights.sum()
    means = differences @ weights / total
    means[np.abs(means) < _EQUAL] = 0.0  # shares that sum to 0 but for rounding
    squares = ((weights * (differences - means[:, None])) ** 2).sum(1)
    errors = np.sqrt(squares * count / (count - 1)) / total
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Floats = np.where(means == 0, 0.0, np.abs(means) / np.where(errors < _EQUAL, 0.0, errors))
    return found
