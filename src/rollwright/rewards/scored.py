"""The input of a reward: a task and one attempt at it.

Always true: the input is derived from the task row and the stored trajectory alone, so that a reward can be recomputed
without an engine. The answer is the text that the agent's function returned; if it returned no text, it is the text of the
last turn that reached the agent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from rollwright.rewards.failure import NoReward
from rollwright.trajectory import LEFT_OUT, UNDELIVERED, Message, Trajectory, Turn, leaves, path

TaskRow = Mapping[str, Any]
"""One row of a task file."""

_SHOWN_FIELDS = 10
"""Limit of field names in an error message."""


@dataclass(frozen=True)
class ScoredAttempt:
    """A task and one attempt at it."""

    task: TaskRow
    trajectory: Trajectory
    leaf: int | None = None
    """Id of the last turn of the branch to score. `None`: the last branch; a chain has only one."""

    @cached_property
    def turns(self) -> list[Turn]:
        """Turns on the path to the answer."""
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
        """The final answer; empty if there is none."""
        if isinstance(self.returned, str):
            return self.returned
        return next(
            (turn.text for turn in reversed(self.turns) if turn.filtered not in (UNDELIVERED, LEFT_OUT)), ""
        )

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """The stored conversation: system prompt and question, then answers and observations."""
        if self.trajectory.conversation:
            return self.trajectory.conversation
        messages = list(self.trajectory.opening)
        for turn in self.turns:
            messages.append(Message("assistant", turn.text, tool_calls=turn.tool_calls))
            if turn.outcome is not None and turn.outcome.observation:
                messages.append(Message("user", turn.outcome.observation))
        return tuple(messages)

    def task_field(self, name: str) -> Any:
        """Value of a field of the task; raises `NoReward` if it is missing."""
        if name not in self.task:
            has = ", ".join(map(str, list(self.task)[:_SHOWN_FIELDS])) or "none"
            raise NoReward(f"the task has no field {name!r}; its fields are: {has}")
        return self.task[name]
