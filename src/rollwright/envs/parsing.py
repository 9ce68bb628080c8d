"""Parses actions from completions and writes completions that contain an action.

Always true: `find` recovers the action that `write` wrote. This is checked when a format is created, so a pattern that no
answer matches is refused before an episode starts.
"""

import re

from rollwright.errors import ConfigError

ANSWER_PATTERN = r"<answer>(.*?)</answer>"
"""The action between answer tags, with any text around them."""

THINK_PATTERN = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
"""The action between answer tags after reasoning between think tags."""

_TEMPLATES = ("<answer>{action}</answer>", "<think>reasoning</think> <answer>{action}</answer>")
"""Templates of an answer, tried in order for a pattern without its own template."""

_CHAT_MARKS = ("<|im_start|>", "<|im_end|>")
"""Chat markers that some engines leave in the text; they are removed from actions."""

_ANY_ACTION = "Some Action"

_SPECIAL = frozenset("\\.^$*+?{}[]()|")
"""Metacharacters of regular expressions."""


class AnswerFormat:
    """A pattern, whose last group is the action, and a matching answer template."""

    def __init__(
        self,
        action_pattern: str = ANSWER_PATTERN,
        answer_template: str | None = None,
        example: str = _ANY_ACTION,
    ) -> None:
        """`example` is an action for checking the template, needed by patterns that enumerate the actions."""
        try:
            self._pattern = re.compile(action_pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(
                f"action_pattern {action_pattern!r} is not a regular expression: {error}"
            ) from None
        self._ending = _ending(action_pattern)
        if not self._pattern.groups:
            raise ConfigError(f"action_pattern {action_pattern!r} needs a group (...) around the action")
        for template in _TEMPLATES if answer_template is None else (answer_template,):
            if self.find(template.replace("{action}", example)) == example:
                self._template = template
                return
        tried = (
            "give answer_template, an answer" if answer_template is None else "answer_template must be one"
        )
        raise ConfigError(
            f"action_pattern {action_pattern!r}: {tried} with {{action}} that the pattern finds"
        )

    def find(self, completion: str) -> str | None:
        """The action in the first match, without chat markers and surrounding space; `None`: no match."""
        # Searching only up to the last closing tag: with many opening tags and no closing one, the regular expression would
        # scan to the end of the text from each of them, in quadratic time.
        end = completion.rfind(self._ending)
        match = None if end < 0 else self._pattern.search(completion, 0, end + len(self._ending))
        if match is None:
            return None
        action: str = match[self._pattern.groups] or ""
        for mark in _CHAT_MARKS:
            action = action.replace(mark, "")
        return action.strip()

    def write(self, action: str) -> str:
        """A completion that contains `action`."""
        return self._template.replace("{action}", action)

    def request(self, what: str, example: str) -> str:
        """Instruction for the model to answer in this format."""
        return f"Give {what} in exactly this form: {self.write(example)}"


def _ending(pattern: str) -> str:
    """Literal text that ends every match of the pattern; empty if it cannot be determined simply."""
    last = pattern.rpartition(")")[2]
    return "" if "|" in pattern or "(?" in pattern or _SPECIAL & set(last) else last
