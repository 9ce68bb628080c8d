"""An environment's answer to a turn, read as plain data.

Always true: an `Outcome` holds a text, finite rewards and plain booleans, whatever a user-defined environment returned;
any other value is a `FormatError` that names it.
"""

from rollwright.envs.base import Step
from rollwright.errors import FormatError
from rollwright.trajectory import LARGEST_REWARD, Outcome, reward_of, truth_of


def outcome_of(step: Step) -> Outcome:
    """Reads a step; raises `FormatError` for a value of a wrong kind."""
    if not isinstance(step, Step):
        raise FormatError(f"step() gave a {type(step).__name__}; a Step is accepted")
    info = step.info
    if (
        type(step.observation) is str
        and type(step.reward) is float
        and -LARGEST_REWARD <= step.reward <= LARGEST_REWARD
        and type(step.terminated) is bool
        and type(step.truncated) is bool
        and not info
    ):  # fast path: almost every step needs no conversion
        return Outcome(
            observation=step.observation,
            reward=step.reward,
            terminated=step.terminated,
            truncated=step.truncated,
        )
    return Outcome(
        observation=text_of(step.observation, "the observation"),
        reward=reward_of(step.reward, "the reward"),
        penalty=reward_of(info.get("penalty", 0.0), "the penalty"),
        terminated=truth_of(step.terminated, "terminated"),
        truncated=truth_of(step.truncated, "truncated"),
        action=None if (action := info.get("action")) is None else text_of(action, "the action"),
        valid=truth_of(info.get("valid", True), "valid"),
        success=None if (success := info.get("success")) is None else truth_of(success, "success"),
    )


def text_of(given: object, what: str) -> str:
    if isinstance(given, str):
        return given
    raise FormatError(f"{what} is a {type(given).__name__}; a text is accepted")
