"""Tasks of known difficulty first: the order in which an evaluation plays its tasks, from earlier results. Pure.

Earlier evaluations, of this model or of others, tell how often each task is solved. Tasks that are solved about half of the
time tell most of a model; those that are always or never solved hardly any. So tasks are divided into strata of like
difficulty, and at every moment the next task is taken from the stratum that reduces the variance of the result most
(Neyman's allocation, one task at a time).

Always true:
- The order follows from the earlier results and the seed alone, and is fixed before the first task is played: no outcome of
  this evaluation changes it. Within a stratum it is a random one.
- So the tasks that were played of a stratum are a random part of it, whatever the earlier results say, and the mean in which
  each stratum has the weight of all its tasks (`intervals`) has no bias. Earlier results that mislead cost efficiency, never
  validity; also if some of them are this model's own.
- Estimates at successive looks have the covariance of the later one, stratum by stratum, as means of growing random samples
  do. So the critical value of repeated looks, which knows nothing else, holds. It is too large, never too small, where the
  later tasks tell less than the earlier ones, which is the purpose of this order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from rollwright import rng

MOST_STRATA = 4
"""Strata of tasks with earlier results. A few have nearly all of the gain, and each needs tasks to know its spread."""

LEAST_TASKS = 5
"""Tasks of a stratum at least; smaller ones are joined with their neighbours."""

UNKNOWN = "not known"


@dataclass(frozen=True)
class EarlierResult:
    """What earlier evaluations say of one task."""

    score: float
    """Mean over its samples."""
    samples: int

    @property
    def expected(self) -> float:
        """The solved share, with half a success and half a failure added: few samples say little."""
        return (self.score * self.samples + 0.5) / (self.samples + 1)


@dataclass(frozen=True)
class TaskOrder:
    """The order of an evaluation's tasks."""

    places: tuple[int, ...]
    """The tasks, by their place in the order without earlier results."""
    strata: tuple[int, ...]
    """The stratum of each, in the new order."""
    labels: tuple[str, ...]
    """Of the strata: the scores that are expected after the earlier evaluations."""

    def totals(self, chosen: Sequence[int] | None = None) -> dict[int, int]:
        """Tasks in each stratum, of all or of those at these places of the new order."""
        found = dict.fromkeys(range(len(self.labels)), 0)
        for place in range(len(self.strata)) if chosen is None else chosen:
            found[self.strata[place]] += 1
        return found


def make_order(
    tasks: int, earlier: Mapping[int, EarlierResult], seed: int, *, share: bool = True
) -> TaskOrder | None:
    """`earlier`: by the task's place. `share`: the scores are solved shares, so that they also tell how much the result of a
    task varies. `None`: too few tasks have earlier results for any other order than the one that there is."""
    strata = _divide(tasks, earlier, share)
    if len(strata) < 2:
        return None
    for number, (_, places) in enumerate(strata):
        Random(rng.digest("difficulty order", seed, number)).shuffle(places)
    spreads = [_spread(places, earlier) if share else 1.0 for _, places in strata]
    taken = _allocate([len(places) for _, places in strata], spreads)
    nexts = [iter(places) for _, places in strata]
    return TaskOrder(
        tuple(next(nexts[stratum]) for stratum in taken), tuple(taken), tuple(label for label, _ in strata)
    )


def _divide(tasks: int, earlier: Mapping[int, EarlierResult], share: bool) -> list[tuple[str, list[int]]]:
    """Labels and tasks of the strata, the hardest first, tasks without earlier results last."""
    levels: dict[float, list[int]] = {}
    for place in sorted(earlier):
        found = earlier[place]
        levels.setdefault(found.expected if share else found.score, []).append(place)
    weights = {level: len(places) * (_deviation(level) if share else 1.0) for level, places in levels.items()}
    wanted = math.fsum(weights.values()) / MOST_STRATA
    cut: list[list[int]] = [[]]
    reached = 0.0
    for level in sorted(levels):
        if reached >= wanted and len(cut[-1]) >= LEAST_TASKS:
            cut.append([])
            reached = 0.0
        cut[-1] += levels[level]
        reached += weights[level]
    if len(cut) > 1 and len(cut[-1]) < LEAST_TASKS:
        last = cut.pop()
        cut[-1] += last
    unknown = [place for place in range(tasks) if place not in earlier]
    if unknown and len(unknown) < LEAST_TASKS:
        cut[len(cut) // 2] += unknown
        unknown = []
    divided = [(_label(places, earlier, share), places) for places in cut if places]
    return [*divided, (UNKNOWN, unknown)] if unknown else divided


def _label(places: Sequence[int], earlier: Mapping[int, EarlierResult], share: bool) -> str:
    known = [earlier[place] for place in places if place in earlier]
    expected = [each.expected if share else each.score for each in known]
    low, high = min(expected), max(expected)
    return f"{low:.2f}" if low == high else f"{low:.2f} – {high:.2f}"


def _deviation(share: float) -> float:
    return math.sqrt(share * (1 - share))


def _spread(places: Sequence[int], earlier: Mapping[int, EarlierResult]) -> float:
    """Standard deviation to expect of the results of a stratum's tasks; the largest possible where nothing is known."""
    shares = [earlier[place].expected if place in earlier else 0.5 for place in places]
    return math.sqrt(math.fsum(each * (1 - each) for each in shares) / len(shares))


def _allocate(sizes: Sequence[int], spreads: Sequence[float]) -> list[int]:
    """The stratum of each task in turn: the one that reduces the variance of the mean most. Two of each come first, so that
    every stratum's spread is known."""
    taken = [0] * len(sizes)
    worth = [(size * spread) ** 2 for size, spread in zip(sizes, spreads, strict=True)]
    order = []
    for _ in range(sum(sizes)):
        open_strata = [each for each in range(len(sizes)) if taken[each] < sizes[each]]
        few = [each for each in open_strata if taken[each] < 2]
        best = max(
            few or open_strata,
            key=lambda each: (
                -taken[each] if few else 0,
                worth[each] / (taken[each] * (taken[each] + 1) or 1),
            ),
        )
        taken[best] += 1
        order.append(best)
    return order
