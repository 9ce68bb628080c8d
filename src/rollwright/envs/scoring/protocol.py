"""Plain data: what a judge is asked and what it answers."""

from enum import StrEnum
from typing import Any

import msgspec

LEVEL = "level"
"""Beside a dataset's own options: a level of its curriculum. No dataset has an option of this name."""


class JudgeAsk(StrEnum):
    """What is wanted."""

    CHECK = "check"
    """Do the dataset and its options exist, and can it be judged? Answered with an empty `Entry`."""
    ENTRY = "entry"
    """The question of a seed."""
    SCORE = "score"
    """What an answer is worth."""


class JudgeRequest(msgspec.Struct, frozen=True):
    id: int
    ask: JudgeAsk
    dataset: str
    options: dict[str, Any]
    seed: int = 0
    answer: str = ""
    seconds: float = 0.0
    """For scoring the answer, once the question stands."""


class Entry(msgspec.Struct, frozen=True, tag="entry"):
    """One question."""

    question: str = ""
    answer: str | None = None
    """One that the scorer gives full marks; `None`: the dataset has none."""


class Score(msgspec.Struct, frozen=True, tag="score"):
    """What an answer is worth."""

    value: float
    """From 0 to 1."""
    killed: bool = False
    """Scoring the answer took too much time or memory, or crashed; worth 0."""
    failed: bool = False
    """The scorer raised on the answer; worth 0."""
    refused: bool = False
    """The answer is code where the dataset's grammar has none, so nothing was made of it; worth 0."""


class NoQuestion(msgspec.Struct, frozen=True, tag="refusal"):
    """Why there is no question."""

    message: str
    is_config: bool
    """Whether the dataset's name or options are wrong; otherwise making the question failed."""


Result = Entry | Score | NoQuestion


class MakingQuestion(msgspec.Struct, frozen=True, tag="making"):
    """The judge begins to make the question of a request, which is not the answer's time."""


class QuestionStands(msgspec.Struct, frozen=True, tag="standing"):
    """The question stands: from here on the answer's time runs."""


class JudgeReply(msgspec.Struct, frozen=True, tag="judged"):
    """The reply to one request; requests are replied to in their order."""

    id: int
    result: Result
    is_last: bool = False
    """Whether the judge ends with it, and takes up nothing more."""


JudgeMessage = MakingQuestion | QuestionStands | JudgeReply
