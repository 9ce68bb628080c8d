"""The terminal agent: a model that works in the attempt's box by commands in plain text.

It asks for one answer at a time, runs the command of the answer in the box, and shows its output, until the answer is `done`
or a limit is reached. What a command does wrong is shown to the model; a box that cannot run commands ends the attempt. A
resumed attempt gets the recorded answers and runs their commands again in its new box; where the output differs, it begins
anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollwright.agents.failures import failed
from rollwright.agents.session import OutOfRoom, Session
from rollwright.envs.base import Step
from rollwright.envs.terminal import NO_COMMAND, SYSTEM, describe_result, read_action
from rollwright.errors import ConfigError
from rollwright.sandbox.attempts import current_boxes
from rollwright.sandbox.box import Box, BoxError
from rollwright.trajectory import Boundary, Message, Phase, Turn

INSTRUCTION_FIELDS = ("instruction", "question", "prompt", "problem", "task")
"""Fields of a row that may hold what is to be done; the first one counts."""


@dataclass(frozen=True)
class TerminalAgent:
    """Solves a task by commands in the attempt's box."""

    max_turns: int = 30
    seconds: float = 120.0
    """Time limit of a command."""
    output_limit: int = 8000
    """Characters of a command's output that the model sees."""
    system: str = SYSTEM

    async def __call__(self, task: Any, session: Session) -> str:
        """Plays a row of tasks; returns the last answer."""
        turn = await self.solve(session, instruction_of(task))
        return "" if turn is None else turn.text

    async def solve(self, session: Session, instruction: str) -> Turn | None:
        """Plays to the end; returns the last turn, `None` if there was no room for one."""
        boxes = current_boxes()
        try:
            box = await boxes.box()
        except BoxError as error:
            raise failed(Boundary.TOOL, error, 0) from error
        messages = [Message("system", self.system), Message("user", instruction)]
        turn: Turn | None = None
        for _ in range(self.max_turns):
            try:
                turn = await session.generate(messages, continues=turn, agent="terminal")
            except OutOfRoom:
                return turn
            step = await self._act(session, box, boxes.agent_user, turn)
            turn = session.observe(turn, step)
            if step.terminated:
                return turn
            messages = [Message("user", step.observation)]
        return turn

    async def _act(self, session: Session, box: Box, user: str | None, turn: Turn) -> Step:
        action = read_action(turn.text)
        if action.is_done:
            return Step("", 0.0, True, False, {"action": "done", "valid": True})
        if action.command is None:
            return Step(NO_COMMAND, 0.0, False, False, {"action": None, "valid": False})
        try:
            with session.waiting(Phase.TOOL, "bash", agent=turn.agent):
                result = await box.run(
                    action.command, seconds=self.seconds, user=user, max_output=4 * self.output_limit
                )
        except BoxError as error:
            raise failed(Boundary.TOOL, error, turn.id + 1) from error
        shown = describe_result(result, self.output_limit)
        return Step(shown, 0.0, False, False, {"action": action.command, "valid": True})


def instruction_of(task: Any) -> str:
    """What a task asks for: a text, or the first of the usual fields of a row."""
    if isinstance(task, str):
        return task
    if isinstance(task, Mapping):
        found = next((str(task[name]) for name in INSTRUCTION_FIELDS if task.get(name)), None)
        if found is not None:
            return found
    raise ConfigError(f"agent: the task has none of the fields {', '.join(INSTRUCTION_FIELDS)}")
