"""The statistics of evaluations: exact estimators, and tests that keep their level."""

import itertools
from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.evaluation import permutation
from rollwright.evaluation.distributions import repeated_looks, t_quantile, t_two_sided
from rollwright.evaluation.intervals import TaskValues, mean
from rollwright.evaluation.permutation import permutation_test
from rollwright.evaluation.sequential import StoppingPlan
from rollwright.evaluation.statistics import (
    EXACT_SIGNS,
    compare_paired,
    majority_at_k,
    paired_test,
    pass_at_k,
)

EVALUATIONS = 2000


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


@pytest.mark.parametrize(
    ("tasks", "skill", "samples"),
    [(8, 0.4, (4, 4)), (30, 0.4, (4, 4)), (100, 0.05, (8, 8)), (40, 0.3, (1, 16)), (12, 0.9, (2, 8))],
)
def test_a_paired_test_of_equally_good_models_rejects_5_percent(
    tasks: int, skill: float, samples: tuple[int, int]
) -> None:
    random = Random(f"level {tasks} {skill}")
    rejected = 0
    for _ in range(EVALUATIONS):
        differences = []
        for _ in range(tasks):
            chance = random.betavariate(2 * skill, 2 * (1 - skill))
            first, second = (sum(random.random() < chance for _ in range(n)) / n for n in samples)
            differences.append(second - first)
        p_value, test = paired_test(differences)
        assert p_value is not None
        assert test == ("sign-flip" if sum(map(bool, differences)) <= EXACT_SIGNS else "t")
        rejected += p_value < 0.05
    assert rejected / EVALUATIONS <= 0.06
    assert rejected / EVALUATIONS >= (0.025 if tasks > EXACT_SIGNS else 0.0)


@pytest.mark.parametrize("tasks", [8, 20, 50, 200])
@pytest.mark.parametrize(
    ("skill", "correlation", "samples"),
    [
        (0.1, 0.33, (1, 16)),
        (0.03, 0.0, (16, 1)),
        (0.95, 0.33, (1, 4)),
        (0.5, 0.33, (4, 4)),
        (0.5, 0.0, (1, 1)),
    ],
)
def test_compared_by_their_samples_equally_good_models_are_told_apart_at_most_5_percent_of_the_time(
    tasks: int, skill: float, correlation: float, samples: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few samples against many make lopsided differences, which a t test rejects up to half of the time."""
    monkeypatch.setattr(permutation, "DRAWS", 199)
    evaluations = 400
    random = np.random.default_rng([tasks, round(100 * skill), *samples])
    rejected = 0
    for _ in range(evaluations):
        chances = np.full(tasks, skill)
        if correlation:
            strength = (1 - correlation) / correlation
            chances = random.beta(skill * strength, (1 - skill) * strength, tasks)
        scores = [(random.random((tasks, n)) < chances[:, None]).astype(float).tolist() for n in samples]
        found = permutation_test(scores[0], scores[1], [1.0] * tasks, 0.05)
        rejected += found.p_value <= 0.05
    assert rejected / evaluations <= 0.05 + 2.6 * (0.05 * 0.95 / evaluations) ** 0.5
    if skill == 0.5 and tasks >= 20:
        assert rejected / evaluations >= 0.015  # ties of single samples leave little to reject


def test_models_that_differ_by_task_and_are_equally_good_on_average_keep_the_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(permutation, "DRAWS", 199)
    random = np.random.default_rng(3)
    rejected = 0
    for _ in range(600):
        scores = [
            (random.random((60, n)) < random.beta(0.6, 1.4, (60, 1))).astype(float).tolist() for n in (2, 8)
        ]
        rejected += permutation_test(scores[0], scores[1], [1.0] * 60, 0.05).p_value <= 0.05
    assert 0.02 <= rejected / 600 <= 0.075


def test_the_interval_of_a_comparison_contains_0_where_its_test_does_not_reject() -> None:
    random = np.random.default_rng(5)
    for better in (0.0, 0.1, 0.25):
        samples = [
            {str(task): (random.random(n) < 0.4 + gain).astype(float).tolist() for task in range(30)}
            for n, gain in ((3, 0.0), (5, better))
        ]
        means = [{task: mean(each) for task, each in one.items()} for one in samples]
        found = compare_paired(means[0], means[1], samples=(samples[0], samples[1]))
        assert found.test == "permutation"
        assert found.interval is not None
        assert found.p_value is not None
        assert (found.interval.low <= 0 <= found.interval.high) == (found.p_value > 0.05)
        assert found == compare_paired(means[0], means[1], samples=(samples[0], samples[1]))


def test_a_permutation_test_takes_any_scores_and_so_few_tasks_as_two() -> None:
    found = permutation_test([[0.5, 1.5], [2.0]], [[0.5, 3.5], [2.5]], [1.0, 1.0], 0.05)
    assert found.p_value > 0.05
    same = permutation_test([[1.0], [2.0]], [[1.0], [2.0]], [1.0, 1.0], 0.05)
    assert same.p_value == 1.0


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


def test_looks_are_fixed_by_the_number_of_tasks_and_a_plan_without_a_target_has_one() -> None:
    assert StoppingPlan.make(200, 0.05, first=20).looks == (20, 30, 45, 68, 101, 152, 200)
    plan = StoppingPlan.make(200, None, first=20)
    assert plan.looks == (200,)
    assert plan.look_confidence == 0.95
    assert not plan.stops(TaskValues([0.5] * 199), share=True)


def test_weights_of_tasks_move_the_difference_and_its_error_as_copies_of_the_tasks_would() -> None:
    first = {"a": 0.0, "b": 0.5, "c": 1.0}
    second = {"a": 1.0, "b": 0.5, "c": 0.5}
    found = compare_paired(first, second, weights={"a": 3.0, "b": 1.0, "c": 2.0})
    assert found.difference == pytest.approx((3 * 1.0 + 1 * 0.0 + 2 * -0.5) / 6)
    equal = compare_paired(first, second, weights=dict.fromkeys("abc", 7.0))
    plain = compare_paired(first, second)
    assert (equal.difference, equal.error, equal.p_value) == pytest.approx(
        (plain.difference, plain.error, plain.p_value)
    )
