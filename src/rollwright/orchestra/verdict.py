"""Verdicts: what an agent that judges has said, read from its completion.

Always true: the last verdict counts, upper and lower case are the same, and a completion without one is malformed;
what a malformed one means is declared for each agent and never guessed.
"""

import re
from enum import StrEnum
from typing import NamedTuple

from pydantic import model_validator

from rollwright.settings import Settings


class Verdict(StrEnum):
    APPROVE = "approve"
    """Right, or enough: whatever the rule's word stands for."""
    REJECT = "reject"


class Judgement(NamedTuple):
    verdict: Verdict
    malformed: bool
    """No verdict was found: `verdict` is what the rule says for that case."""


class VerdictRule(Settings):
    """How an agent that judges writes its verdict; the last one counts."""

    malformed: Verdict
    """What a completion without a verdict means."""
    tag: str = "verify"
    """The verdict stands in this tag."""
    approve: str = "approve"
    """The word for it."""
    reject: str = "reject"
    """The word for it."""

    @model_validator(mode="after")
    def _fits(self) -> "VerdictRule":
        if not (self.tag and self.approve and self.reject) or self.approve.lower() == self.reject.lower():
            raise ValueError(
                f"tag: {self.tag!r}, approve {self.approve!r}, reject {self.reject!r}: a tag and two different words are "
                "needed"
            )
        return self

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
