"""Sums too large for a small model's head, with a calculator: what is to be computed, the calculator's result, an answer.

Always true: the problem depends on the seed and the settings alone; a pair of numbers is of one part only, whatever is asked
of it, so no held-out problem has the numbers of one that is trained on. A completion with two numbers and a sign between them
(`37 * 48`) is a call, and the calculator's result is the next message, whatever the completion says behind it. Any other
completion is the answer: its last number counts.
"""

import re
from collections.abc import Sequence
from copy import copy
from typing import Self

from rollwright import rng
from rollwright.envs.base import Info, PromptTemplates, Reset, Step
from rollwright.envs.splits import Part
from rollwright.errors import ConfigError
from rollwright.tools.calculator import calculate

PROMPTS = PromptTemplates(
    system="Be brief. First write the sum for the calculator, then say what it says.",
    opening="{observation}",
    turn="The calculator says {observation}.",
)

_HELD_OUT = 5
"""One pair of numbers in this many is held out."""

_CALL = re.compile(r"(\d+)\s*([-+*x×])\s*(\d+)")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

_PROBLEMS: Sequence[tuple[str, str]] = (
    ("What is {a} times {b}?", "*"),
    ("What is {a} plus {b}?", "+"),
    ("What is {a} minus {b}?", "-"),
)
"""What is asked, and what is to be computed."""


class CalculatorSums:
    """One operation on two numbers; one seed, one problem."""

    instruction = ""

    def __init__(self, part: str = "all", smallest: int = 11, largest: int = 99, max_steps: int = 3) -> None:
        if not 1 <= smallest < largest:
            raise ConfigError(f"smallest and largest: {smallest} to {largest} is no range of numbers")
        self._part = Part.parse(part)
        self._range = (smallest, largest)
        self._max_steps = max_steps
        self._question, self._operator = "", ""
        self._numbers = (0, 0)
        self._steps = 0

    @property
    def prompts(self) -> PromptTemplates:
        return PROMPTS

    async def reset(self, seed: int) -> Reset:
        drawn = rng.generator("calculator sums", seed)
        low, high = self._range
        while True:
            a, b = drawn.randint(low, high), drawn.randint(low, high)
            if a != b and self._part in (Part.ALL, pair_part(a, b)):
                break
        self._question, self._operator = drawn.choice(_PROBLEMS)
        self._numbers = (max(a, b), min(a, b)) if self._operator == "-" else (a, b)
        self._steps = 0
        a, b = self._numbers
        return Reset(self._question.format(a=a, b=b), {"success": False})

    @property
    def result(self) -> int:
        a, b = self._numbers
        return {"+": a + b, "-": a - b, "*": a * b}[self._operator]

    async def step(self, answer: str) -> Step:
        self._steps += 1
        if (call := _CALL.search(answer)) is not None:
            return self._compute("".join(call.groups()))
        numbers = _NUMBER.findall(answer)
        action = numbers[-1] if numbers else None
        right = action == str(self.result)
        info: Info = {"action": action, "valid": action is not None, "success": right}
        return Step("", float(right), True, False, info)

    def _compute(self, written: str) -> Step:
        expression = written.replace("x", "*").replace("×", "*").strip()
        try:
            result = str(calculate(expression))
        except ValueError as error:
            result = str(error)
        info: Info = {
            "action": expression,
            "valid": True,
            "success": False,
            "metrics": {"tool_calls": 1},
        }
        ended = self._steps >= self._max_steps
        return Step(result, 0.0, False, ended, info)

    def actions(self) -> Sequence[str]:
        """No finite list of answers exists."""
        return []

    def best_action(self) -> str | None:
        a, b = self._numbers
        return str(self.result) if self._steps else f"{a} {self._operator} {b}"

    def answer(self, action: str) -> str:
        return action

    def fork(self) -> Self:
        return copy(self)

    async def close(self) -> None:
        """Holds nothing."""


def pair_part(a: int, b: int) -> Part:
    """The part of two numbers, in any order."""
    return Part.TRAIN if rng.digest("calculator sums", min(a, b), max(a, b)) % _HELD_OUT else Part.HELD_OUT
