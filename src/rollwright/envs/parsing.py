"""Where the action stands in a model's completion, and how a completion names one.

Both directions live here, so they cannot disagree: what `write` makes, `find` reads back. That is checked
when a format is made, so a pattern that no answer could match is refused before an episode starts.
"""

import re

from rollwright.errors import ConfigError

ANSWER_PATTERN = r"<answer>(.*?)</answer>"
"""The action between answer tags; anything may stand around them."""

THINK_PATTERN = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
"""The same, with reasoning asked for in front of it."""

_TEMPLATES = ("<answer>{action}</answer>", "<think>reasoning</think> <answer>{action}</answer>")
"""How an answer is written, tried in this order for a pattern that comes without a template of its own."""

_CHAT_MARKS = ("<|im_start|>", "<|im_end|>")
"""Some engines leave these in the text; they are never part of an action."""

_ANY_ACTION = "Some Action"

_SPECIAL = frozenset("\\.^$*+?{}[]()|")
"""Characters that stand for something else in a pattern."""


class AnswerFormat:
    """One pattern (the action is its last group) and the template of an answer that fits it."""

    def __init__(
        self,
        action_pattern: str = ANSWER_PATTERN,
        answer_template: str | None = None,
        example: str = _ANY_ACTION,
    ) -> None:
        """`example` is an action that must be found again, for patterns that list the actions."""
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
        """The action of the first match, without chat marks and surrounding space; `None`: no match."""
        # A model that repeats an opening tag without end would have each of them searched for its closing one.
        end = completion.rfind(self._ending)
        match = None if end < 0 else self._pattern.search(completion, 0, end + len(self._ending))
        if match is None:
            return None
        action: str = match[self._pattern.groups] or ""
        for mark in _CHAT_MARKS:
            action = action.replace(mark, "")
        return action.strip()

    def write(self, action: str) -> str:
        """A completion that names `action`."""
        return self._template.replace("{action}", action)

    def request(self, what: str, example: str) -> str:
        """The sentence that asks for this format."""
        return f"Give {what} in exactly this form: {self.write(example)}"


def _ending(pattern: str) -> str:
    """Text that every match of the pattern ends with, as far as that is plain to see; else nothing."""
    last = pattern.rpartition(")")[2]
    return "" if "|" in pattern or "(?" in pattern or _SPECIAL & set(last) else last
