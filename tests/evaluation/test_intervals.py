"""Intervals of evaluations cover as often as they say: clustered tasks, unequal samples, few tasks, extreme skills."""

import math
from collections.abc import Sequence
from random import Random

import pytest

from rollwright.evaluation.intervals import (
    ShareTest,
    TaskValues,
    bootstrap,
    closed_form,
    task_values,
)
from rollwright.evaluation.sequential import StoppingPlan
from rollwright.evaluation.strata import EarlierResult, TaskOrder, make_order

EVALUATIONS = 2000
CONFIDENCE = 0.95


def task_counts(random: Random, tasks: int, skill: float, correlation: float) -> list[tuple[int, int]]:
    """One simulated evaluation: tasks of different difficulty (a beta distribution around the skill; `correlation` of two
    samples of a task), and between 1 and 16 samples of each."""
    found = []
    for _ in range(tasks):
        chance = skill
        if correlation:
            strength = (1 - correlation) / correlation
            chance = random.betavariate(skill * strength, (1 - skill) * strength)
        samples = random.randint(1, 16)
        found.append((sum(random.random() < chance for _ in range(samples)), samples))
    return found


def covers(counts: Sequence[tuple[int, int]], skill: float) -> bool:
    """Whether the interval covers: its bounds are where the test has these levels, see the test below."""
    return (1 - CONFIDENCE) / 2 <= ShareTest(counts).below(skill) <= (1 + CONFIDENCE) / 2


@pytest.mark.parametrize(
    ("tasks", "skill", "correlation"),
    [(40, 0.3, 0.3), (60, 0.7, 0.6), (100, 0.2, 0.1), (150, 0.9, 0.3), (20, 0.6, 0.6)],
)
def test_intervals_cover_94_to_96_percent_of_2000_evaluations(
    tasks: int, skill: float, correlation: float
) -> None:
    random = Random(f"closed form {tasks} {skill}")
    covered = sum(covers(task_counts(random, tasks, skill, correlation), skill) for _ in range(EVALUATIONS))
    assert 0.94 <= covered / EVALUATIONS <= 0.96


@pytest.mark.parametrize(
    ("tasks", "skill", "correlation"),
    [(8, 0.2, 0.3), (8, 0.5, 0.6), (20, 0.03, 0.3), (100, 0.03, 0.6), (100, 0.97, 0.1)],
)
def test_few_tasks_and_extreme_skills_cover_at_least_94_percent_and_not_much_more(
    tasks: int, skill: float, correlation: float
) -> None:
    random = Random(f"few {tasks} {skill}")
    covered = sum(covers(task_counts(random, tasks, skill, correlation), skill) for _ in range(EVALUATIONS))
    assert 0.94 <= covered / EVALUATIONS <= 0.98


@pytest.mark.parametrize(("tasks", "skill"), [(2, 0.5), (8, 0.03), (30, 0.4), (30, 1.0), (30, 0.0)])
def test_the_bounds_are_where_the_test_begins_to_reject(tasks: int, skill: float) -> None:
    counts = task_counts(Random(f"bounds {tasks} {skill}"), tasks, skill, 0.3 if 0 < skill < 1 else 0.0)
    found = closed_form([solved / n for solved, n in counts], share=True, counts=counts)
    assert found is not None
    test = ShareTest(counts)
    middle = sum(solved / n for solved, n in counts) / tasks
    assert 0 <= found.low <= middle <= found.high <= 1
    if middle > 0:
        assert test.below(found.low) == pytest.approx(0.975, abs=1e-9)
    else:
        assert found.low == 0
    if middle < 1:
        assert test.below(found.high) == pytest.approx(0.025, abs=1e-9)
    else:
        assert found.high == 1


def test_binary_tasks_have_wilsons_interval() -> None:
    """With one sample of each task the correlation does not matter."""
    counts = [(int(number < 30), 1) for number in range(100)]
    found = closed_form([solved / n for solved, n in counts], share=True, counts=counts)
    assert found is not None
    z = 1.959963984540054
    centre, half = (
        (0.3 + z * z / 200) / (1 + z * z / 100),
        z / (1 + z * z / 100) * math.sqrt(0.21 / 100 + z * z / 40000),
    )
    assert (found.low, found.high) == pytest.approx((centre - half, centre + half), abs=1e-9)


def test_bootstrap_intervals_cover_94_to_96_percent() -> None:
    random, tasks, skill = Random("bootstrap"), 40, 0.4
    covered = 0
    for number in range(1000):
        values = [solved / n for solved, n in task_counts(random, tasks, skill, 0.4)]
        found = bootstrap(values, number, share=True, draws=250)
        assert found is not None
        covered += found.low <= skill <= found.high
    assert 0.94 <= covered / 1000 <= 0.965


def test_shares_that_are_no_means_of_samples_cover_too() -> None:
    """pass@4 of 8 samples."""
    random = Random("pass@4")
    covered = 0
    truth = 1 - math.exp(math.lgamma(2.1 + 4) + math.lgamma(3.0) - math.lgamma(2.1) - math.lgamma(7.0))
    for _ in range(EVALUATIONS):
        values = []
        for _ in range(50):
            chance = random.betavariate(0.9, 2.1)
            solved = sum(random.random() < chance for _ in range(8))
            values.append(1 - math.comb(8 - solved, 4) / math.comb(8, 4))
        found = closed_form(values, share=True)
        assert found is not None
        covered += found.low <= truth <= found.high
    assert 0.94 <= covered / EVALUATIONS <= 0.965


def test_ignoring_that_samples_share_a_task_would_undercover() -> None:
    """The simulation can fail: the same intervals over single samples, as if they were tasks, cover far less."""
    random = Random("naive")
    covered = 0
    for _ in range(500):
        counts = task_counts(random, 40, 0.4, 0.3)
        single = [(int(number < solved), 1) for solved, n in counts for number in range(n)]
        covered += covers(single, 0.4)
    assert covered / 500 < 0.85


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
    random = Random("sequential")
    plan = StoppingPlan.make(200, 0.08, first=20)
    covered, played, naive = 0, 0, 0
    for _ in range(400):
        values = [solved / n for solved, n in task_counts(random, 200, 0.9, 0.3)]
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
    assert covered / 400 >= 0.945
    assert covered > naive
    assert played / 400 < 120


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
