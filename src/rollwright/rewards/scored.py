"""What a reward is computed from, read from a task and a stored trajectory alone, so that it can be computed again.

Always true: nothing here asks an engine, and the same record gives the same input. The answer is the text that the
agent's function returned; where it returned no text, it is the text of the last turn that reached the agent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from rollwright.rewards.failure import NoReward
from rollwright.trajectory import UNDELIVERED, Message, Trajectory, Turn, leaves, path

TaskRow = Mapping[str, Any]
"""One row of a task file."""

_SHOWN_FIELDS = 10
"""Names of fields in an error line."""


@dataclass(frozen=True)
class ScoredAttempt:
    """A task and one attempt at it."""

    task: TaskRow
    trajectory: Trajectory
    leaf: int | None = None
    """The last turn of the branch that is looked at. `None`: the last branch, which in a chain is the only one."""

    @cached_property
    def turns(self) -> list[Turn]:
        """The decisions that led to the answer."""
        ends = leaves(self.trajectory.turns)
        if self.leaf is None and not ends:
            return []
        return path(self.trajectory.turns, ends[-1] if self.leaf is None else self.leaf)

    @cached_property
    def returned(self) -> Any:
        """The value that the agent's function returned; `None`: it returned nothing."""
        text = self.trajectory.returned
        try:
            return None if text is None else msgspec.json.decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise NoReward(f"the returned value that is stored is not JSON: {error}") from error

    @cached_property
    def answer(self) -> str:
        """The final answer; empty where there is none."""
        if isinstance(self.returned, str):
            return self.returned
        return next((turn.text for turn in reversed(self.turns) if turn.filtered != UNDELIVERED), "")

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """The conversation, as far as it is stored: system prompt and question, then answers and observations."""
        if self.trajectory.conversation:
            return self.trajectory.conversation
        messages = list(self.trajectory.opening)
        for turn in self.turns:
            messages.append(Message("assistant", turn.text, tool_calls=turn.tool_calls))
            if turn.outcome is not None and turn.outcome.observation:
                messages.append(Message("user", turn.outcome.observation))
        return tuple(messages)

    def task_field(self, name: str) -> Any:
        """The value of a field; one that the task does not have is a failure."""
        if name not in self.task:
            has = ", ".join(map(str, list(self.task)[:_SHOWN_FIELDS])) or "none"
            raise NoReward(f"the task has no field {name!r}; its fields are: {has}")
        return self.task[name]
