"""What of a completion is an agent's answer, and whether it has the form that was asked for.

Always true: an answer in a tag is what stands between the first opening mark and the closing mark behind it, with
both; a completion without such a pair is invalid and its answer is empty. Where the whole completion is the answer,
an invalid one is still shown to the others.
"""

import re
from typing import NamedTuple

from pydantic import model_validator

from rollwright.settings import Settings

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
