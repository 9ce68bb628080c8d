"""Plain data: requests to a judge and its messages."""

from enum import StrEnum
from typing import Any

import msgspec

LEVEL = "level"
"""Option for a level of a dataset's curriculum; no dataset has an option of this name itself."""


class JudgeOperation(StrEnum):
    """Kind of request."""

    CHECK = "check"
    """Check that dataset and options exist and that answers can be scored; the reply is an empty `Entry`."""
    ENTRY = "entry"
    """Create the question of a seed."""
    SCORE = "score"
    """Score an answer."""


class JudgeRequest(msgspec.Struct, frozen=True):
    """Request to a judge."""

    id: int
    ask: JudgeOperation
    dataset: str
    options: dict[str, Any]
    seed: int = 0
    answer: str = ""
    seconds: float = 0.0
    """Time limit for scoring, which starts when the question is ready."""


class Entry(msgspec.Struct, frozen=True, tag="entry"):
    """One question."""

    question: str = ""
    answer: str | None = None
    """An answer with the full score; `None`: the dataset provides none."""


class Score(msgspec.Struct, frozen=True, tag="score"):
    """Score of an answer."""

    value: float
    """From 0 to 1."""
    killed: bool = False
    """Scoring exceeded its time or memory, or crashed; the value is 0."""
    failed: bool = False
    """The scorer raised; the value is 0."""
    refused: bool = False
    """The answer is code, which the dataset's grammar does not allow; the value is 0."""


class QuestionError(msgspec.Struct, frozen=True, tag="refusal"):
    """Reason why a question cannot be created."""

    message: str
    is_config: bool
    """Whether the dataset's name or options are invalid; otherwise the generator failed."""


Result = Entry | Score | QuestionError


class QuestionStarted(msgspec.Struct, frozen=True, tag="making"):
    """The judge starts creating the question of a request; this does not count as scoring time."""


class QuestionReady(msgspec.Struct, frozen=True, tag="standing"):
    """The question is ready, and the scoring time starts."""


class JudgeReply(msgspec.Struct, frozen=True, tag="judged"):
    """Reply to one request; replies come in the order of the requests."""

    id: int
    result: Result
    is_last: bool = False
    """Whether the judge ends after this reply, and drops its other requests."""


JudgeMessage = QuestionStarted | QuestionReady | JudgeReply
