"""The statistics of evaluations: exact estimators, intervals that cover, tests that keep their level."""

import itertools
import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.evaluation.distributions import repeated_looks, t_quantile, t_two_sided
from rollwright.evaluation.sequential import StoppingPlan
from rollwright.evaluation.statistics import (
    EXACT_SIGNS,
    bootstrap,
    closed_form,
    compare_paired,
    majority_at_k,
    mean,
    paired_test,
    pass_at_k,
)

EVALUATIONS = 2000


def task_means(random: Random, tasks: int, skill: float, spread: float = 0.3) -> list[float]:
    """One simulated evaluation: tasks of different difficulty (a beta distribution around the skill; `spread`: correlation
    of two samples of a task), and between 1 and 16 samples of each."""
    strength = (1 - spread) / spread
    found = []
    for _ in range(tasks):
        chance = random.betavariate(skill * strength, (1 - skill) * strength)
        samples = random.randint(1, 16)
        found.append(sum(random.random() < chance for _ in range(samples)) / samples)
    return found


@given(st.integers(1, 60), st.data())
def test_pass_at_k_is_the_closed_form_to_1e_12(samples: int, data: st.DataObject) -> None:
    solved, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    missed = 1.0
    for place in range(k):  # the chance that none of k draws without return is a solved one
        missed *= max(0, samples - solved - place) / (samples - place)
    assert pass_at_k(samples, solved, k) == pytest.approx(1 - missed, abs=1e-12)


def test_pass_at_k_of_many_samples_neither_overflows_nor_loses_digits() -> None:
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01, abs=1e-15)
    assert pass_at_k(5, 0, 5) == 0.0
    assert pass_at_k(5, 5, 1) == 1.0
    with pytest.raises(ValueError, match="pass@6"):
        pass_at_k(5, 1, 6)


@settings(max_examples=60)
@given(st.lists(st.sampled_from("aabc"), min_size=1, max_size=7), st.data())
def test_majority_at_k_is_the_mean_over_all_draws_of_k(answers: list[str], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    right = data.draw(st.sampled_from("abc"))
    wins = []
    for drawn in itertools.combinations(range(len(answers)), k):
        counts = Counter(answers[each] for each in drawn)
        most = [each for each in counts if counts[each] == max(counts.values())]
        wins.append((right in most) / len(most))
    votes = [(each, float(each == right)) for each in answers]
    assert majority_at_k(votes, k) == pytest.approx(mean(wins), abs=1e-12)


def test_majority_at_one_is_the_mean_score_and_at_many_the_plurality() -> None:
    votes = [("x", 1.0)] * 5 + [("y", 0.0)] * 3 + [(number, 0.0) for number in range(40)]
    assert majority_at_k(votes, 1) == pytest.approx(5 / 48, abs=1e-12)
    assert majority_at_k(votes, len(votes)) == 1.0


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [
        (0.975, 1, 12.706204736174),
        (0.975, 4, 2.776445105198),
        (0.975, 10, 2.228138851965),
        (0.995, 3, 5.840909309733),
        (0.95, 120, 1.657650899),
        (0.025, 10, -2.228138851965),
    ],
)
def test_t_quantiles_are_those_of_the_tables(probability: float, freedom: int, expected: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(expected, abs=1e-8)
    assert t_two_sided(expected, freedom) == pytest.approx(2 * min(probability, 1 - probability), abs=1e-9)


@pytest.mark.parametrize(("looks", "expected"), [(1, 1.960), (2, 2.178), (5, 2.413), (10, 2.555)])
def test_the_critical_value_of_repeated_looks_is_pococks(looks: int, expected: float) -> None:
    sizes = tuple(range(10, 10 * looks + 1, 10))
    assert repeated_looks(sizes, 0.95) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("tasks", "skill"), [(40, 0.3), (60, 0.7), (100, 0.2), (150, 0.85)])
def test_closed_form_intervals_cover_94_to_96_percent_of_2000_evaluations(tasks: int, skill: float) -> None:
    random = Random(f"closed form {tasks} {skill}")
    covered = 0
    for _ in range(EVALUATIONS):
        found = closed_form(task_means(random, tasks, skill), share=True)
        assert found is not None
        covered += found.low <= skill <= found.high
    assert 0.94 <= covered / EVALUATIONS <= 0.96


def test_bootstrap_intervals_cover_94_to_96_percent_of_2000_evaluations() -> None:
    random = Random("bootstrap")
    covered = 0
    for number in range(EVALUATIONS):
        found = bootstrap(task_means(random, 40, 0.4), number, draws=400)
        assert found is not None
        covered += found.low <= 0.4 <= found.high
    assert 0.94 <= covered / EVALUATIONS <= 0.96


@pytest.mark.parametrize(("tasks", "skill"), [(5, 0.5), (8, 0.2), (10, 0.97), (20, 0.03)])
def test_few_tasks_and_extreme_skills_are_not_claimed_more_certain_than_they_are(
    tasks: int, skill: float
) -> None:
    random = Random(f"few {tasks} {skill}")
    covered = 0
    for _ in range(1000):
        found = closed_form(task_means(random, tasks, skill), share=True)
        assert found is not None
        assert 0 <= found.low <= found.high <= 1
        covered += found.low <= skill <= found.high
    assert covered / 1000 >= 0.93


def test_ignoring_that_samples_share_a_task_would_undercover() -> None:
    """The simulation can fail: the same intervals over single samples, as if they were tasks, cover far less."""
    random = Random("naive")
    covered = 0
    for _ in range(500):
        samples: list[float] = []
        for _ in range(40):
            chance = random.betavariate(0.4 * 7 / 3, 0.6 * 7 / 3)
            samples += [float(random.random() < chance) for _ in range(8)]
        found = closed_form(samples, share=True)
        assert found is not None
        covered += found.low <= 0.4 <= found.high
    assert covered / 500 < 0.85


def test_rewards_that_are_no_shares_get_a_t_interval() -> None:
    found = closed_form([-3.0, 5.0, 1.0, 1.0], share=False)
    assert found is not None
    assert found.low == pytest.approx(1 - 3.182446305 * math.sqrt(32 / 3 / 4), abs=1e-6)
    assert closed_form([1.0], share=True) is None


@pytest.mark.parametrize("tasks", [8, 30, 100])
def test_a_paired_test_of_equally_good_models_rejects_5_percent(tasks: int) -> None:
    random = Random(f"level {tasks}")
    rejected = 0
    for _ in range(EVALUATIONS):
        differences = []
        for _ in range(tasks):
            chance = random.betavariate(0.8, 1.2)
            first, second = (sum(random.random() < chance for _ in range(4)) / 4 for _ in range(2))
            differences.append(second - first)
        p_value, test = paired_test(differences)
        assert p_value is not None
        assert test == ("sign-flip" if sum(map(bool, differences)) <= EXACT_SIGNS else "t")
        rejected += p_value < 0.05
    assert rejected / EVALUATIONS <= 0.06
    assert rejected / EVALUATIONS >= (0.03 if tasks > EXACT_SIGNS else 0.0)


def test_pairing_finds_a_difference_that_separate_intervals_hide() -> None:
    hard = [number / 40 for number in range(40)]
    first = {str(each): each * 0.9 for each in hard}
    second = {str(each): each * 0.9 + 0.05 + 0.01 * (number % 3) for number, each in enumerate(hard)}
    found = compare_paired(first, second)
    assert found.p_value is not None
    assert found.p_value < 1e-6
    assert found.error is not None
    assert found.unpaired_error is not None
    assert found.error < found.unpaired_error / 10
    assert (found.better, found.worse) == (40, 0)
    same = compare_paired(first, first)
    assert same.p_value == 1.0
    assert same.difference == 0.0


def test_stopping_at_the_first_narrow_interval_keeps_the_coverage() -> None:
    """The same simulation with uncorrected looks stops at lucky moments and covers less than the corrected one."""
    random = Random("sequential")
    plan = StoppingPlan.make(200, 0.08, first=20)
    covered, played, naive = 0, 0, 0
    for _ in range(1000):
        values = task_means(random, 200, 0.9)
        for size in plan.looks:
            found = closed_form(values[:size], share=True)
            assert found is not None
            if found.half_width <= 0.08 or size == 200:
                naive += found.low <= 0.9 <= found.high
                break
        for size in plan.looks:
            if plan.stops(values[:size], share=True):
                corrected = plan.interval(values[:size], share=True)
                assert corrected is not None
                covered += corrected.low <= 0.9 <= corrected.high
                played += size
                break
    assert covered / 1000 >= 0.95
    assert naive < covered
    assert played / 1000 < 160


def test_looks_are_fixed_by_the_number_of_tasks_and_a_plan_without_a_target_has_one() -> None:
    assert StoppingPlan.make(200, 0.05, first=20).looks == (20, 30, 45, 68, 101, 152, 200)
    plan = StoppingPlan.make(200, None, first=20)
    assert plan.looks == (200,)
    assert plan.look_confidence == 0.95
    assert not plan.stops([0.5] * 199, share=True)
