"""Request and response of the process that compares mathematical answers."""

import msgspec


class MathQuestion(msgspec.Struct, frozen=True):
    """Request: an answer and the right ones."""

    right: tuple[str, ...]
    """Right answers; one of them suffices."""
    answer: str


class MathVerdict(msgspec.Struct, frozen=True):
    """Response."""

    is_right: bool = False
    problem: str = ""
    """Why the task's right answers cannot be compared with; empty: no problem."""
