"""Intervals of evaluations cover as often as they say: clustered tasks, unequal samples, few tasks, extreme skills."""

import math
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from rollwright.evaluation.intervals import TaskValues, bootstrap, closed_form, task_values
from rollwright.evaluation.sequential import StoppingPlan
from rollwright.evaluation.share_test import ShareTest, bootstrap_level
from rollwright.evaluation.strata import EarlierResult, TaskOrder, make_order

EVALUATIONS = 2000
LEVEL = 0.05
Counts = NDArray[np.int64]


def simulate(
    tasks: int,
    skill: float,
    correlation: float,
    *,
    kinds: bool = False,
    samples: Sequence[int] = tuple(range(1, 17)),
    evaluations: int = EVALUATIONS,
) -> tuple[Counts, Counts]:
    """Solved samples and samples of each task, a row for each simulated evaluation: tasks of different difficulty (a beta
    distribution around the skill, or `kinds`: easy ones and hard ones; `correlation` of two samples of a task), and between 1 and
    16 samples of each."""
    random = np.random.default_rng([tasks, round(1000 * skill), round(1000 * correlation), kinds, *samples])
    shape = evaluations, tasks
    chances = np.full(shape, skill)
    if kinds:
        low, high = skill * (1 - correlation**0.5), skill + (1 - skill) * correlation**0.5
        chances = np.where(random.random(shape) < skill, high, low)
    elif correlation:
        strength = (1 - correlation) / correlation
        chances = random.beta(skill * strength, (1 - skill) * strength, shape)
    drawn = random.choice(np.array(samples), shape)
    return random.binomial(drawn, chances), drawn


def coverage(solved: Counts, samples: Counts, skill: float) -> float:
    """Share of the intervals that cover: their bounds are where the p-value is the level, see the test below."""
    return float((ShareTest.of_counts(solved, samples).p_values(skill) >= LEVEL).mean())


@pytest.mark.parametrize(
    ("tasks", "skill", "correlation", "kinds"),
    [
        (20, 0.3, 0.1, False),
        (20, 0.6, 0.6, False),
        (20, 0.5, 0.25, True),
        (40, 0.3, 0.3, False),
        (60, 0.7, 0.6, False),
        (100, 0.05, 0.3, False),
        (100, 0.2, 0.1, False),
        (150, 0.9, 0.25, True),
        (200, 0.95, 0.3, False),
        (300, 0.05, 0.25, True),
        (500, 0.9, 0.9, True),
    ],
)
def test_intervals_cover_94_to_96_percent_of_2000_evaluations(
    tasks: int, skill: float, correlation: float, kinds: bool
) -> None:
    assert 0.94 <= coverage(*simulate(tasks, skill, correlation, kinds=kinds), skill) <= 0.96


@pytest.mark.parametrize(
    ("tasks", "skill", "correlation", "samples"),
    [
        (8, 0.2, 0.3, range(1, 17)),
        (8, 0.5, 0.6, range(1, 17)),
        (20, 0.03, 0.3, range(1, 17)),
        (20, 0.1, 0.0, [8]),
        (50, 0.05, 0.1, [1, 16]),
        (50, 0.95, 0.2, [8]),
        (100, 0.03, 0.6, range(1, 17)),
    ],
)
def test_few_tasks_and_extreme_skills_cover_at_least_94_percent_and_not_much_more(
    tasks: int, skill: float, correlation: float, samples: Sequence[int]
) -> None:
    found = coverage(*simulate(tasks, skill, correlation, samples=tuple(samples)), skill)
    assert 0.94 <= found <= 0.975


@pytest.mark.parametrize("tasks", [50, 100, 200])
def test_one_sample_of_each_task_covers_95_percent_on_average_over_skills(tasks: int) -> None:
    """Exact: with one sample the number of solved tasks is binomial. Only a few results are possible, so that the coverage of any
    interval jumps with the skill; on average over skills it stays near 95 %, at least as near as Wilson's."""
    solved = np.arange(tasks + 1)
    counts = (solved[:, None] > np.arange(tasks)).astype(np.int64)
    test = ShareTest.of_counts(counts, np.ones_like(counts))
    ours, wilsons = [], []
    for skill in np.linspace(0.05, 0.95, 91):
        ways = np.array([math.log(math.comb(tasks, each)) for each in solved])
        chances = np.exp(ways + solved * math.log(skill) + (tasks - solved) * math.log1p(-skill))
        ours.append(chances[test.p_values(skill) >= LEVEL].sum())
        distance = np.abs(solved / tasks - skill) / math.sqrt(skill * (1 - skill) / tasks)
        wilsons.append(chances[distance <= 1.96].sum())
    assert np.mean(ours) == pytest.approx(0.95, abs=0.004)
    distances = [np.abs(np.array(each) - 0.95).mean() for each in (ours, wilsons)]
    assert distances[0] < distances[1] + 0.001


@pytest.mark.parametrize(("tasks", "skill"), [(2, 0.5), (8, 0.03), (30, 0.4), (30, 1.0), (30, 0.0)])
def test_the_bounds_are_where_the_test_begins_to_reject(tasks: int, skill: float) -> None:
    solved, samples = simulate(tasks, skill, 0.3 if 0 < skill < 1 else 0.0, evaluations=1)
    counts = [(int(k), int(n)) for k, n in zip(solved[0], samples[0], strict=True)]
    found = closed_form([k / n for k, n in counts], share=True, counts=counts)
    assert found is not None
    test = ShareTest.of_counts(solved, samples)
    middle = float((solved / samples).mean())
    assert 0 <= found.low <= middle <= found.high <= 1
    if middle > 0:
        assert test.p_values(found.low)[0] == pytest.approx(LEVEL, abs=1e-9)
    else:
        assert found.low == 0
    if middle < 1:
        assert test.p_values(found.high)[0] == pytest.approx(LEVEL, abs=1e-9)
    else:
        assert found.high == 1


@pytest.mark.parametrize(
    ("tasks", "skill", "correlation", "kinds"), [(20, 0.4, 0.3, False), (50, 0.1, 0.25, True)]
)
def test_bootstrap_intervals_cover_94_to_96_percent(
    tasks: int, skill: float, correlation: float, kinds: bool
) -> None:
    solved, samples = simulate(tasks, skill, correlation, kinds=kinds)
    levels = [
        bootstrap_level(k / n, np.stack([k, n], 1), LEVEL, number, 100)
        for number, (k, n) in enumerate(zip(solved, samples, strict=True))
    ]
    covered = (ShareTest.of_counts(solved, samples).p_values(skill) >= np.array(levels)).mean()
    assert 0.94 <= covered <= 0.96
    counts = [(int(k), int(n)) for k, n in zip(solved[0], samples[0], strict=True)]
    values = [k / n for k, n in counts]
    found = bootstrap(values, 0, share=True, counts=counts, draws=200)
    assert found is not None
    assert found == bootstrap(values, 0, share=True, counts=counts, draws=200)
    level = bootstrap_level(values, counts, LEVEL, 0, 200)
    p_value = ShareTest.of_counts(solved[:1], samples[:1]).p_values(found.low)[0]
    assert p_value == pytest.approx(level, abs=1e-9)


def test_shares_that_are_no_means_of_samples_cover_too() -> None:
    """pass@4 of 8 samples."""
    truth = 1 - math.exp(math.lgamma(2.1 + 4) + math.lgamma(3.0) - math.lgamma(2.1) - math.lgamma(7.0))
    random = np.random.default_rng(4)
    solved = random.binomial(8, random.beta(0.9, 2.1, (EVALUATIONS, 50)))
    passed = np.array([1 - math.comb(8 - each, 4) / math.comb(8, 4) for each in range(9)])
    covered = (ShareTest.of_values(passed[solved]).p_values(truth) >= LEVEL).mean()
    assert 0.94 <= covered <= 0.96


def test_ignoring_that_samples_share_a_task_would_undercover() -> None:
    """The simulation can fail: the same intervals over single samples, as if they were tasks, cover far less."""
    solved, _ = simulate(40, 0.4, 0.3, samples=(8,), evaluations=500)
    single = (np.arange(8) < solved[:, :, None]).reshape(500, -1).astype(np.int64)
    assert coverage(single, np.ones_like(single), 0.4) < 0.85


def test_rewards_that_are_no_shares_get_a_t_interval() -> None:
    found = closed_form([-3.0, 5.0, 1.0, 1.0], share=False)
    assert found is not None
    assert found.low == pytest.approx(1 - 3.182446305 * math.sqrt(32 / 3 / 4), abs=1e-6)
    assert closed_form([1.0], share=True) is None
    assert bootstrap([1.0], 1) is None


def test_scores_that_are_shares_of_leaves_are_not_taken_for_counts() -> None:
    assert task_values([[1.0, 0.0]], [0], None, share=True).counts == [(1, 2)]
    assert task_values([[0.5, 0.0]], [0], None, share=True).counts is None
    assert task_values([[1.0, 0.0]], [0], None, share=False).counts is None


def test_stopping_at_the_first_narrow_interval_keeps_the_coverage() -> None:
    """The same simulation with uncorrected looks stops at lucky moments and covers less than the corrected one."""
    plan = StoppingPlan.make(200, 0.08, first=20)
    covered, played, naive = 0, 0, 0
    for solved, samples in zip(*simulate(200, 0.9, 0.3, evaluations=200), strict=True):
        values = [float(each) for each in solved / samples]
        for size in plan.looks:
            found = closed_form(values[:size], share=True)
            assert found is not None
            if found.half_width <= 0.08 or size == 200:
                naive += found.low <= 0.9 <= found.high
                break
        for size in plan.looks:
            seen = TaskValues(values[:size])
            if plan.stops(seen, share=True):
                corrected = plan.interval(seen, share=True)
                assert corrected is not None
                covered += corrected.low <= 0.9 <= corrected.high
                played += size
                break
    assert covered / 200 >= 0.945
    assert covered > naive
    assert played / 200 < 120


def known(random: Random, chances: Sequence[float], samples: int) -> dict[int, EarlierResult]:
    return {
        place: EarlierResult(sum(random.random() < chance for _ in range(samples)) / samples, samples)
        for place, chance in enumerate(chances)
    }


@pytest.mark.parametrize("truthful", [True, False])
def test_tasks_of_known_difficulty_first_keep_coverage_without_bias_and_need_fewer_tasks(
    truthful: bool,
) -> None:
    """`truthful`: the earlier results are those of like models; otherwise they say nothing, and only cost efficiency."""
    random = Random(f"difficulty {truthful}")
    plan = StoppingPlan.make(300, 0.05, first=20)
    covered, played, shuffled, error, naive = 0, 0, 0, 0.0, 0.0
    for number in range(300):
        chances = [random.betavariate(0.1, 0.9) for _ in range(300)]
        others = chances if truthful else random.sample(chances, 300)
        order = make_order(300, known(random, others, 4), number)
        assert order is not None
        scores = [[float(random.random() < each) for _ in range(4)] for each in chances]
        for size in plan.looks:
            seen = look(scores, order, size)
            if plan.stops(seen, share=True):
                break
        found = plan.interval(seen, share=True)
        assert found is not None
        covered += found.low <= 0.1 <= found.high
        played += len(seen.values)
        fixed = look(scores, order, 68)  # the mean at a stop is biased a little in any order
        error += fixed.mean - 0.1
        naive += sum(fixed.values) / 68 - 0.1
        values = [sum(each) / 4 for each in scores]
        shuffled += next(s for s in plan.looks if plan.stops(TaskValues(values[:s]), share=True))
    assert covered / 300 >= 0.94
    assert abs(error / 300) < 0.004
    if truthful:
        assert played < 0.75 * shuffled
        assert naive / 300 > 0.015  # without the weights, the tasks that tell most would be mistaken for all


def look(scores: Sequence[Sequence[float]], order: TaskOrder, size: int) -> TaskValues:
    chosen = [scores[place] for place in order.places[:size]]
    return task_values(chosen, order.strata[:size], order.totals(), share=True)


def test_an_order_plays_every_task_once_and_the_telling_ones_earlier() -> None:
    earlier = {place: EarlierResult((0.0, 0.5, 1.0)[place % 3], 8) for place in range(90)}
    order = make_order(100, earlier, 7)
    assert order is not None
    assert sorted(order.places) == list(range(100))
    assert order == make_order(100, earlier, 7)
    assert order != make_order(100, earlier, 8)
    assert order.labels[-1] == "not known"
    half = [place for place in order.places[:40] if place < 90 and place % 3 == 1]
    easy = [place for place in order.places[:40] if place < 90 and place % 3 == 2]
    assert len(half) > 1.4 * len(easy) > 0
    assert set(order.strata[:10]) == set(range(len(order.labels)))
    few = {place: EarlierResult(1.0 if place > 96 else place % 2 / 4, 4) for place in range(100)}
    joined = make_order(100, few, 7)  # the last three are too few for a stratum
    assert joined is not None
    assert sorted(joined.places) == list(range(100))
    assert joined.labels == ("0.10", "0.30 – 0.90")
    assert make_order(100, {}, 7) is None
    assert make_order(100, {place: EarlierResult(0.5, 4) for place in range(100)}, 7) is None


def test_a_stratum_with_too_few_results_is_joined_with_its_neighbour() -> None:
    found = TaskValues([1.0, 0.0, 0.0, 0.0], None, [0, 1, 1, 1], {0: 10, 1: 10, 2: 5})
    assert found.mean == pytest.approx(0.25)
    assert found.interval(share=True) is not None
    weighted = TaskValues([1.0, 1.0, 0.0, 0.0], None, [0, 0, 1, 1], {0: 30, 1: 10})
    assert weighted.mean == pytest.approx(0.75)
    drawn = weighted.bootstrap(3, share=True, draws=200)
    assert drawn is not None
    assert drawn.low < 0.75 < drawn.high
