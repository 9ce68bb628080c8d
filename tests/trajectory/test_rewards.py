"""A reward is a finite real number of any type. Other values are refused and never count as 0."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import FormatError
from rollwright.trajectory import (
    LARGEST_REWARD,
    Outcome,
    Trajectory,
    Turn,
    check_rewards,
    reward_of,
    truth_of,
)


@pytest.mark.parametrize(
    ("given_reward", "expected"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(-2), -2.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
        (2**70, float(2**70)) if LARGEST_REWARD > 2**70 else (2**50, float(2**50)),
    ],
)
def test_real_numbers_of_any_type_are_rewards(given_reward: Any, expected: float) -> None:
    taken = reward_of(given_reward, "the reward")
    assert taken == expected
    assert type(taken) is float


@pytest.mark.parametrize(
    "given_reward",
    [
        math.nan,
        math.inf,
        -math.inf,
        1e39,
        np.float64("nan"),
        np.float32("inf"),
        torch.tensor(math.nan),
        None,
        "1.0",
        b"1",
        [1.0],
        {},
        1 + 0j,
        10**400,
        np.array([1.0]),
        np.array([1.0, 2.0]),
        torch.tensor([1.0, 2.0]),
        object(),
        Decimal("NaN"),
    ],
    ids=lambda each: repr(each)[:20],
)
def test_everything_else_is_refused_and_said(given_reward: Any) -> None:
    with pytest.raises(FormatError, match=r"the reward is .*a finite number.* is accepted"):
        reward_of(given_reward, "the reward")


@given(st.floats() | st.integers())
def test_what_passes_can_be_summed_and_squared_in_single_precision(number: float) -> None:
    try:
        taken = reward_of(number, "the reward")
    except FormatError:
        assert not abs(number) <= LARGEST_REWARD
        return
    assert taken == float(number)
    assert np.isfinite(np.float32(taken) * np.float32(taken) * np.float32(64))


@pytest.mark.parametrize(
    ("told", "expected"), [(True, True), (0, False), (np.bool_(False), False), (np.int8(1), True)]
)
def test_a_yes_or_no_of_any_type_is_taken(told: Any, expected: bool) -> None:
    assert truth_of(told, "terminated") is expected


@pytest.mark.parametrize("told", [None, "False", "", 2, 0.5, [], np.array([True])], ids=repr)
def test_what_is_neither_yes_nor_no_is_refused(told: Any) -> None:
    with pytest.raises(FormatError, match=r"terminated is .*; true or false is accepted"):
        truth_of(told, "terminated")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e30])
def test_a_trajectory_with_such_a_number_is_refused_wherever_it_stands(bad: float) -> None:
    def trajectory(reward: float = 0.0, penalty: float = 0.0, episode: float = 0.0) -> Trajectory:
        turn = Turn(id=0, after=None, extends=None, outcome=Outcome("", reward, penalty))
        return Trajectory("r", "a", "g", "t", 0, turns=[turn], episode_reward=episode)

    assert check_rewards(trajectory(1.0, -0.5, 2.0)).reward == 3.0
    for where in ("reward", "penalty", "episode"):
        with pytest.raises(FormatError, match="trajectory r"):
            check_rewards(trajectory(**{where: bad}))
