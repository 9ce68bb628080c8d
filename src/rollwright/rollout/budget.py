"""What a tree may cost, shared by all its branches. Pure.

Always true: a budget limits how many branches are *started*; a branch that was started is played to its end, so every
leaf has a real reward. A question always gets one answer; more than one only while the budget has room for them.
"""

from dataclasses import dataclass
from enum import StrEnum


class BudgetUnit(StrEnum):
    TOKENS = "tokens"
    """Sampled tokens. What another answer costs is estimated by the mean answer so far."""
    TURNS = "turns"
    """Generations."""
    TOOL_CALLS = "tool_calls"
    """Steps of environments, replayed ones included."""
    LEAVES = "leaves"
    """Branches, ended or not."""


@dataclass
class Budget:
    """One tree's account."""

    limit: int | None = None
    """`None`: the branch policy alone decides."""
    unit: BudgetUnit = BudgetUnit.LEAVES
    tokens: int = 0
    turns: int = 0
    tool_calls: int = 0
    refused: int = 0
    """Answers that a branch policy asked for and that were not in the budget."""

    def spend(self, *, tokens: int = 0, turns: int = 0, tool_calls: int = 0) -> None:
        self.tokens += tokens
        self.turns += turns
        self.tool_calls += tool_calls

    def grant(self, wanted: int, *, leaves: int, unserved: int) -> int:
        """How many of the answers wanted for one question may be sampled, at least one.

        `leaves`: branches so far, with what was granted already. `unserved`: questions that wait for their answers, this one
        included, and answers granted already that are not sampled yet.
        """
        if self.limit is None:
            return wanted
        granted = min(wanted, 1 + max(0, self._room(leaves, unserved)))
        self.refused += wanted - granted
        return granted

    def _room(self, leaves: int, unserved: int) -> int:
        """Answers beyond one for each question."""
        assert self.limit is not None
        match self.unit:
            case BudgetUnit.LEAVES:
                return self.limit - leaves
            case BudgetUnit.TURNS:
                return self.limit - self.turns - unserved
            case BudgetUnit.TOOL_CALLS:
                return self.limit - self.tool_calls - unserved
            case BudgetUnit.TOKENS:
                mean = self.tokens / self.turns if self.turns else 1.0
                return int((self.limit - self.tokens) / max(mean, 1.0)) - unserved
