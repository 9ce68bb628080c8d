"""Verdicts: what an agent that judges has said, read from its completion.

Always true: the last verdict counts, upper and lower case are the same, and a completion without one is malformed;
what a malformed one means is declared for each agent and never guessed.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rollwright.errors import ConfigError


class Verdict(StrEnum):
    APPROVE = "approve"
    """Right, or enough: whatever the rule's word stands for."""
    REJECT = "reject"


class Judgement(NamedTuple):
    verdict: Verdict
    malformed: bool
    """No verdict was found: `verdict` is what the rule says for that case."""


@dataclass(frozen=True)
class VerdictRule:
    """How an agent writes its verdict: `<tag>word</tag>`."""

    malformed: Verdict
    """What a completion without a verdict means: approving fails open, rejecting fails closed."""
    tag: str = "verify"
    approve: str = "approve"
    """The word for it."""
    reject: str = "reject"

    def __post_init__(self) -> None:
        if not (self.tag and self.approve and self.reject) or self.approve.lower() == self.reject.lower():
            raise ConfigError(
                f"verdict: tag {self.tag!r}, approve {self.approve!r}, reject {self.reject!r}: a tag and two different "
                "words are needed"
            )

    def judge(self, text: str) -> Judgement:
        tag, words = re.escape(self.tag), f"{re.escape(self.approve)}|{re.escape(self.reject)}"
        found = re.findall(rf"<{tag}>\s*({words})\s*</{tag}>", text, re.IGNORECASE)
        if not found:
            return Judgement(self.malformed, True)
        return Judgement(
            Verdict.APPROVE if found[-1].lower() == self.approve.lower() else Verdict.REJECT, False
        )

    def write(self, verdict: Verdict) -> str:
        """A completion with this verdict."""
        return f"<{self.tag}>{self.approve if verdict is Verdict.APPROVE else self.reject}</{self.tag}>"
