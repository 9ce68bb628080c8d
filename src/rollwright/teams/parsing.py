"""Verdicts: what an agent that judges has said, read from its completion.

Always true: the last verdict counts, upper and lower case are the same, and a completion without one is malformed;
what a malformed one means is declared for each agent and never guessed.

What of a completion is an agent's answer, and whether it has the form that was asked for.

Always true: an answer in a tag is what stands between the first opening mark and the closing mark behind it, with
both; a completion without such a pair is invalid and its answer is empty. Where the whole completion is the answer,
an invalid one is still shown to the others.
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


BOXED = r"\\boxed\s*\{"
"""A final answer as mathematicians' models write it."""

_THINK = re.compile(r"<think>|</think>")


class Answer(NamedTuple):
    text: str
    """What the environment and the other agents get."""
    valid: bool


class ReadingRule(Settings):
    """What of a completion is the agent's answer."""

    tags: tuple[str, ...] = ()
    """The answer is the first of these tags. Empty: the whole completion."""
    think: bool = False
    """Whether exactly one `<think>…</think>` is needed."""
    pattern: str | None = None
    """A regular expression that a valid completion matches somewhere."""

    @model_validator(mode="after")
    def _fits(self) -> "ReadingRule":
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"pattern: {self.pattern!r} is not a regular expression: {error}") from None
        if any(not re.fullmatch(r"[\w-]+", tag) for tag in self.tags):
            raise ValueError(f"tags: {list(self.tags)}: accepted are names of letters, digits, _ and -")
        return self

    def read(self, completion: str) -> Answer:
        text, found = completion, True
        if self.tags:
            # A tag that the model only thinks about is not its answer.
            spoken = completion.rpartition("</think>")[2] if self.think else completion
            match = re.search(rf"<({'|'.join(self.tags)})>.*?</\1>", spoken, re.DOTALL)
            text, found = (match[0], True) if match else ("", False)
        thought = not self.think or _THINK.findall(completion) == ["<think>", "</think>"]
        matched = self.pattern is None or re.search(self.pattern, completion) is not None
        return Answer(text, found and thought and matched)

    def write(self, content: str, *, tagged: bool = False) -> str:
        """A completion with this content; without `tagged`, the first tag is put around it."""
        if self.tags and not tagged:
            content = f"<{self.tags[0]}>{content}</{self.tags[0]}>"
        return f"<think>…</think>{content}" if self.think else content
