"""Plain data: what the process that compares mathematics is asked, and what it answers."""

import msgspec


class MathQuestion(msgspec.Struct, frozen=True):
    """What is compared."""

    right: tuple[str, ...]
    """Each is a right answer."""
    answer: str


class MathVerdict(msgspec.Struct, frozen=True):
    """What came of it."""

    is_right: bool = False
    problem: str = ""
    """Why nothing could be compared, for a reason that is the task's; empty: nothing was in the way."""
