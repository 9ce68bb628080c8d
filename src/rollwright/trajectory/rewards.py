"""What foreign code may give as a reward or as a yes or no.

Always true of what passes: a reward is a plain `float` that is finite and at most `LARGEST_REWARD` in size. So sums,
means and squares over a group are finite too, in double and in single precision, and one bad number cannot spoil the
advantages of a whole batch. What does not pass is a failure of its attempt; it never counts as 0.
"""

from typing import Any

from rollwright.errors import FormatError
from rollwright.trajectory.forest import Trajectory

LARGEST_REWARD = 1e18
"""Its square is still far inside single precision, which ends at 3.4e38; nobody means more by a reward."""


def reward_of(given: Any, what: str) -> float:
    """A real number of any type (also of numpy or torch, or a bool) as a `float`; a `FormatError` for anything else."""
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
    """A bool, 0 or 1, also of numpy; a `FormatError` for anything else, because `bool("no")` is true."""
    if given is True or given is False:
        return given
    plain = given.item() if not getattr(given, "ndim", 1) and hasattr(given, "item") else given
    if isinstance(plain, int) and plain in (0, 1):
        return bool(plain)
    raise FormatError(f"{what} is {_shown(given)}; true or false is accepted")


def check_rewards(trajectory: Trajectory) -> Trajectory:
    """The same trajectory, or a `FormatError` that names a number in it which is no reward."""
    if not abs(trajectory.episode_reward) <= LARGEST_REWARD:
        reward_of(trajectory.episode_reward, f"trajectory {trajectory.rollout_id}: the reward of the episode")
    for name, value in trajectory.components.items():
        if not abs(value) <= LARGEST_REWARD:
            reward_of(value, f"trajectory {trajectory.rollout_id}: the reward component {name!r}")
    for turn in trajectory.turns:
        outcome = turn.outcome
        if outcome is None:
            continue
        sizes = abs(outcome.reward) + abs(outcome.penalty)
        if not sizes <= LARGEST_REWARD:  # also when it is not a number
            where = f"trajectory {trajectory.rollout_id}, turn {turn.id}"
            reward_of(outcome.reward, f"{where}: the reward")
            reward_of(outcome.penalty, f"{where}: the penalty")
    return trajectory


def _shown(given: Any) -> str:
    text = repr(given)
    return f"a {type(given).__name__} ({text if len(text) <= 60 else text[:60] + '…'})"
