"""Two small environments for trying out teams: sums for the math team, a search for facts for the search team.

Always true: the task depends on the seed and the settings alone; the reward is 1 for the right answer and 0 for any other.
"""

import re
from collections.abc import Sequence

from rollwright import rng
from rollwright.envs.base import PromptTemplates, Reset, Step
from rollwright.errors import ConfigError

PROMPTS = PromptTemplates(system="", opening="{instruction}\n{observation}", turn="{observation}")
"""Prompts for a single agent; the agents of a team have their own."""

_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_TAG = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)

_FIRST = ("Anna", "Bela", "Cora", "Dora", "Emil", "Fanni", "Gabor", "Hanna")
_LAST = ("Albers", "Brandt", "Csonka", "Dahl", "Eder", "Falk", "Gruber", "Horn")
_TOWNS = ("Aalen", "Brno", "Calw", "Dubno", "Esbo", "Fano", "Goslar", "Hvar")
_TRADES = ("bakery", "chandlery", "dairy", "foundry", "glassworks", "mill", "press", "tannery")


class Sums:
    """A sum of a few numbers; one answer, in `\\boxed{}`."""

    instruction = "Solve the problem below."
    prompts = PROMPTS

    def __init__(self, terms: int = 3, format_penalty: float = 0.0) -> None:
        if terms < 2:
            raise ConfigError(f"terms: {terms} is too few; accepted: 2 or more")
        self._terms = terms
        self._format_penalty = format_penalty
        self._sum = 0

    async def reset(self, seed: int) -> Reset:
        drawn = rng.generator("sums", seed)
        numbers = [drawn.randrange(1, 100) for _ in range(self._terms)]
        self._sum = sum(numbers)
        return Reset(f"What is {' + '.join(map(str, numbers))}?", {"success": False})

    async def step(self, answer: str) -> Step:
        found = _BOXED.findall(answer)
        action = found[-1].strip() if found else None
        right = action == str(self._sum)
        penalty = self._format_penalty if action is None else 0.0
        info = {"action": action, "valid": action is not None, "penalty": penalty, "success": right}
        return Step("", float(right), True, False, info)  # type: ignore[arg-type]

    async def close(self) -> None:
        """Holds nothing."""

    def actions(self) -> Sequence[str]:
        return [str(self._sum), str(self._sum + 1)]

    def best_action(self) -> str | None:
        return str(self._sum)

    def answer(self, action: str) -> str:
        return f"\\boxed{{{action}}}"


class Lookup:
    """In which town does a person work? Two facts, each found by searching for the name in the previous one."""

    instruction = "Answer the question below; you can search for names and trades."
    prompts = PROMPTS

    def __init__(self, max_steps: int = 4) -> None:
        self._max_steps = max_steps
        self._facts: dict[str, str] = {}
        self._person = self._trade = self._town = ""
        self._known: set[str] = set()
        self._steps = 0

    async def reset(self, seed: int) -> Reset:
        drawn = rng.generator("lookup", seed)
        self._person = f"{drawn.choice(_FIRST)} {drawn.choice(_LAST)}"
        self._trade, self._town = f"{drawn.choice(_LAST)} {drawn.choice(_TRADES)}", drawn.choice(_TOWNS)
        self._facts = {
            self._person: f"{self._person} works at the {self._trade}.",
            self._trade: f"The {self._trade} is in {self._town}.",
        }
        self._known, self._steps = set(), 0
        return Reset(f"In which town does {self._person} work?", {"success": False})

    async def step(self, answer: str) -> Step:
        self._steps += 1
        match = _TAG.search(answer)
        kind, content = (match[1], match[2].strip()) if match else ("", None)
        over = self._steps >= self._max_steps
        if kind != "search":
            right = kind == "answer" and content == self._town
            info = {"action": content, "valid": match is not None, "success": right}
            return Step("", float(right), match is not None or over, over, info)  # type: ignore[arg-type]
        found = [fact for about, fact in self._facts.items() if content and about in content]
        self._known.update(found)
        shown = " ".join(found) or "Nothing was found."
        return Step(shown, 0.0, False, over, {"action": content, "valid": True, "success": False})

    async def close(self) -> None:
        """Holds nothing."""

    def actions(self) -> Sequence[str]:
        """Both search terms and every town, so that a random answer is usually wrong."""
        return [self._person, self._trade, *_TOWNS]

    def best_action(self) -> str | None:
        """The next search term, or the town once it is known."""
        if self._facts[self._trade] in self._known:
            return self._town
        return self._trade if self._facts[self._person] in self._known else self._person

    def answer(self, action: str) -> str:
        tag = "answer" if action in _TOWNS else "search"
        return f"<{tag}>{action}</{tag}>"
