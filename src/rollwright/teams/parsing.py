"""Parsing of an agent's completion: its answer, and the verdict of an agent that judges.

Always true:
- An answer in a tag is the first opening tag, the closing tag after it and the text between them. A completion without
  such a pair is invalid and its answer is empty. Where the whole completion is the answer, other agents see it even if it
  is invalid.
- The last verdict of a completion counts; case is ignored. A completion without a verdict is malformed; which verdict it
  then stands for is declared for each agent and never guessed.
"""

import re
from enum import StrEnum
from typing import NamedTuple

from pydantic import model_validator

from rollwright.settings import Settings


class Verdict(StrEnum):
    """The decision of an agent that judges."""

    APPROVE = "approve"
    """The work is right, or the information is sufficient, depending on the agent's prompt."""
    REJECT = "reject"


class Judgement(NamedTuple):
    """A parsed verdict."""

    verdict: Verdict
    malformed: bool
    """Whether no verdict was found; `verdict` is then the rule's default."""


class VerdictRule(Settings):
    """Format of the verdict of an agent that judges; the last one in a completion counts."""

    malformed: Verdict
    """Verdict that a completion without one stands for."""
    tag: str = "verify"
    """Name of the tag around the verdict."""
    approve: str = "approve"
    """Word for an approval."""
    reject: str = "reject"
    """Word for a rejection."""

    @model_validator(mode="after")
    def _fits(self) -> "VerdictRule":
        if not (self.tag and self.approve and self.reject) or self.approve.lower() == self.reject.lower():
            raise ValueError(
                f"tag: {self.tag!r}, approve {self.approve!r}, reject {self.reject!r}: a tag and two different words are "
                "needed"
            )
        return self

    def judge(self, text: str) -> Judgement:
        """Parses the verdict of a completion."""
        tag, words = re.escape(self.tag), f"{re.escape(self.approve)}|{re.escape(self.reject)}"
        found = re.findall(rf"<{tag}>\s*({words})\s*</{tag}>", text, re.IGNORECASE)
        if not found:
            return Judgement(self.malformed, True)
        return Judgement(
            Verdict.APPROVE if found[-1].lower() == self.approve.lower() else Verdict.REJECT, False
        )

    def write(self, verdict: Verdict) -> str:
        """Formats a verdict as the rule reads it; used by simulated players."""
        return f"<{self.tag}>{self.approve if verdict is Verdict.APPROVE else self.reject}</{self.tag}>"


BOXED = r"\\boxed\s*\{"
"""Pattern of a final answer in LaTeX."""

_THINK = re.compile(r"<think>|</think>")


class ParsedAnswer(NamedTuple):
    """The answer in a completion."""

    text: str
    """Text that is passed to the environment and to other agents."""
    valid: bool
    """Whether the completion has the required format."""


class ReadingRule(Settings):
    """Which part of a completion is the agent's answer, and which format is required."""

    tags: tuple[str, ...] = ()
    """The answer is the first of these tags in the completion. Empty: the whole completion."""
    think: bool = False
    """Whether exactly one `<think>…</think>` is required."""
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

    def read(self, completion: str) -> ParsedAnswer:
        text, found = completion, True
        if self.tags:
            # A tag inside the reasoning is not the answer.
            spoken = completion.rpartition("</think>")[2] if self.think else completion
            match = re.search(rf"<({'|'.join(self.tags)})>.*?</\1>", spoken, re.DOTALL)
            text, found = (match[0], True) if match else ("", False)
        thought = not self.think or _THINK.findall(completion) == ["<think>", "</think>"]
        matched = self.pattern is None or re.search(self.pattern, completion) is not None
        return ParsedAnswer(text, found and thought and matched)

    def write(self, content: str, *, tagged: bool = False) -> str:
        """Formats a completion with this content. `tagged`: the content already contains its tag."""
        if self.tags and not tagged:
            content = f"<{self.tags[0]}>{content}</{self.tags[0]}>"
        return f"<think>…</think>{content}" if self.think else content
