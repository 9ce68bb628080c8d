"""Distributions of lengths, given by their quantiles."""

from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError
from rollwright.rng import uniform
from rollwright.simulation.lengths import FixedLength, Lengths, LogNormalLength, UniformLength

DRAWS = st.floats(0, 1, exclude_max=True)


@given(st.tuples(DRAWS, DRAWS), st.floats(0.1, 1e4), st.floats(0, 3), st.integers(1, 5000))
def test_quantiles_rise_and_stay_within_their_bounds(
    draws: tuple[float, float], mean: float, sigma: float, longest: int
) -> None:
    every: list[Lengths] = [
        FixedLength(longest),
        UniformLength(1, longest),
        LogNormalLength(mean, sigma, longest),
    ]
    for lengths in every:
        low, high = (lengths.quantile(draw) for draw in sorted(draws))
        assert 1 <= low <= high <= longest


def test_a_uniform_length_reaches_both_ends() -> None:
    assert {UniformLength(2, 4).quantile(draw) for draw in (0.0, 0.5, 0.999)} == {2, 3, 4}


def test_a_lognormal_length_has_its_mean_and_a_heavy_tail() -> None:
    lengths = sorted(LogNormalLength(200, 1.0).quantile(uniform("length", i)) for i in range(20_000))
    assert isclose(sum(lengths) / len(lengths), 200, rel_tol=0.05)
    assert lengths[len(lengths) // 2] < 130
    assert lengths[int(len(lengths) * 0.99)] > 1000


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedLength(0),
        lambda: UniformLength(0, 5),
        lambda: UniformLength(6, 5),
        lambda: LogNormalLength(0),
        lambda: LogNormalLength(10, -1),
        lambda: LogNormalLength(float("nan")),
        lambda: LogNormalLength(10, longest=0),
    ],
)
def test_impossible_distributions_are_refused(make: object) -> None:
    with pytest.raises(ConfigError, match="accepted"):
        make()  # type: ignore[operator]
