"""Failures of rewards: a function or judge did not return a number."""

from rollwright.errors import RollwrightError

_LONGEST_CAUSE = 500
"""Limit of characters of a cause: enough for an exception's message."""


class RewardFailure(RollwrightError):
    """A reward could not be computed. It is a failure of its attempt, which may be retried; it never counts as 0."""

    def __init__(self, reward: str, cause: str) -> None:
        self.reward = reward
        """The reward's name."""
        self.cause = one_line(cause)
        """The cause in one line."""
        super().__init__(f"reward {reward}: {self.cause}")


class NoReward(Exception):
    """Raised inside a component that cannot compute a number; becomes a `RewardFailure` with the reward's name."""


def one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_CAUSE else line[:_LONGEST_CAUSE] + "…"


def describe(error: BaseException) -> str:
    """An exception in one line."""
    return one_line(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
