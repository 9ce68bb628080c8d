"""Validation of rewards and booleans that foreign code returns.

Always true of an accepted reward: it is a plain, finite `float` of at most `LARGEST_REWARD` in magnitude. So sums, means
and squares over a group are finite too, in double and in single precision, and one bad number cannot spoil the advantages
of a whole batch. A refused value fails its attempt; it never counts as 0.
"""

from typing import Any

from rollwright.errors import FormatError
from rollwright.trajectory.forest import Trajectory

LARGEST_REWARD = 1e18
"""Its square, 1e36, is within the range of single precision, which ends at 3.4e38."""


def reward_of(given: Any, what: str) -> float:
    """Converts a real number of any type (numpy, torch and bool included) to `float`, or raises `FormatError`."""
    if type(given) is float:
        number = given
    elif not hasattr(type(given), "__float__") or getattr(given, "ndim", 0) != 0:
        raise FormatError(f"{what} is {_shown(given)}; a finite number is accepted")
    else:
        try:
            number = float(given)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise FormatError(f"{what} is {_shown(given)}; a finite number is accepted") from error
    if -LARGEST_REWARD <= number <= LARGEST_REWARD:
        return number
    raise FormatError(f"{what} is {number:g}; a finite number of at most {LARGEST_REWARD:g} is accepted")


def truth_of(given: Any, what: str) -> bool:
    """Converts a bool, 0 or 1 (numpy included) to `bool`, or raises `FormatError`, because `bool("no")` is true."""
    if given is True or given is False:
        return given
    plain = given.item() if not getattr(given, "ndim", 1) and hasattr(given, "item") else given
    if isinstance(plain, int) and plain in (0, 1):
        return bool(plain)
    raise FormatError(f"{what} is {_shown(given)}; true or false is accepted")


def check_rewards(trajectory: Trajectory) -> Trajectory:
    """Returns the trajectory, or raises a `FormatError` that names the first invalid reward in it."""
    if not abs(trajectory.episode_reward) <= LARGEST_REWARD:
        reward_of(trajectory.episode_reward, f"trajectory {trajectory.rollout_id}: the reward of the episode")
    for name, value in trajectory.components.items():
        if not abs(value) <= LARGEST_REWARD:
            reward_of(value, f"trajectory {trajectory.rollout_id}: the reward component {name!r}")
    for turn in trajectory.turns:
        outcome = turn.outcome
        if outcome is None:
            continue
        magnitude = abs(outcome.reward) + abs(outcome.penalty)
        if not magnitude <= LARGEST_REWARD:  # also true for NaN
            where = f"trajectory {trajectory.rollout_id}, turn {turn.id}"
            reward_of(outcome.reward, f"{where}: the reward")
            reward_of(outcome.penalty, f"{where}: the penalty")
    return trajectory


def _shown(given: Any) -> str:
    text = repr(given)
    return f"a {type(given).__name__} ({text if len(text) <= 60 else text[:60] + '…'})"
