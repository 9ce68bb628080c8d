"""Environment of tasks with tools: a question, tool calls with results, and a final answer that a function scores.

It works with any policy, also without tool support in the chat format: calls are written as text between tags, and the
prompt explains the format. Calls of one completion run concurrently; mistakes are reported to the model and cost the
format penalty. The tools' leases are released at the end of the episode, on `reset` and on `close`. A resumed episode is
replayed from its completions, so its calls are made again; if a result differs, the episode starts from the beginning.
"""

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable
from typing import Any, Self

import msgspec

from rollwright.envs.base import Info, PromptTemplates, Reset, Step
from rollwright.envs.parsing import AnswerFormat
from rollwright.errors import ConfigError, RollwrightError
from rollwright.tools import Toolbox, ToolContext
from rollwright.trajectory import ToolCall, reward_of

PROMPTS = PromptTemplates(
    system="You solve tasks, with tools where they help.",
    opening="{instruction}\n\n{observation}",
    turn="{observation}",
)

SOLVED = 1.0
"""Lowest score of a solved task."""

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_EXAMPLE = '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'


class Task(msgspec.Struct, frozen=True):
    """One question with the reference data of its scorer."""

    question: str
    truth: Any = None
    """Passed to the scorer as part of the task."""


class _TextCall(msgspec.Struct, frozen=True):
    """JSON of a call between tags."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


Scorer = Callable[[Task, str], "float | Awaitable[float]"]
"""Scores an answer to a task from 0 to 1."""


class ToolEnv:
    """An environment over a list of tasks; the seed selects the task."""

    def __init__(
        self, tasks: Sequence[Task], score: Scorer, toolbox: Toolbox, *, format_penalty: float = 0.0
    ) -> None:
        """`format_penalty` applies to a completion without call and answer, or with an invalid call."""
        if not tasks:
            raise ConfigError("a tool environment needs at least one task")
        if format_penalty > 0:
            raise ConfigError(f"format_penalty must be zero or negative, got {format_penalty}")
        self._tasks = tasks
        self._score = score
        self._toolbox = toolbox
        self._format_penalty = format_penalty
        self._format = AnswerFormat()
        self._task: Task | None = None
        """The current task; `None`: no episode is running."""
        self._context: ToolContext | None = None
        self._calls = 0

    @property
    def stateless(self) -> bool:
        """Whether no tool keeps state between calls, so that a fork needs no replay."""
        return not self._toolbox.stateful

    def fork(self) -> Self:
        """A copy in the same state of the same task."""
        if not self.stateless:
            raise RollwrightError("tools: a stateful tool cannot be copied; replay the calls instead")
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._context = None if self._context is None else ToolContext(self._context.rollout_id)
        return other

    @property
    def instruction(self) -> str:
        tools = "\n".join(json.dumps(msgspec.to_builtins(each)) for each in self._toolbox.specs)
        return (
            f"Tools:\n{tools}\n\nTo use tools, write one or more calls, each in exactly this form: {_EXAMPLE}\n"
            f"When you are done: {self._format.request('your answer', 'your answer')}"
        )

    @property
    def prompts(self) -> PromptTemplates:
        return PROMPTS

    async def reset(self, seed: int) -> Reset:
        self._end()
        self._task = self._tasks[seed % len(self._tasks)]
        self._context = ToolContext(f"seed {seed}")
        self._calls = 0
        return Reset(self._task.question, {"success": False})

    async def step(self, answer: str) -> Step:
        if self._task is None or self._context is None:
            raise RollwrightError("tools: no task is open; call reset first")
        if written := _CALL.findall(answer):
            return await self._use_tools(written, self._context)
        found = self._format.find(answer)
        if found is None:
            text = f"That was neither a call ({_EXAMPLE}) nor an answer ({self._format.write('...')})."
            return self._continue(text, None, problems=1, calls=0)
        return await self._finish(found)

    async def close(self) -> None:
        self._end()

    async def _use_tools(self, written: Sequence[str], context: ToolContext) -> Step:
        calls = [self._parse_call(each) for each in written]
        results = iter(
            await self._toolbox.run([each for each in calls if isinstance(each, ToolCall)], context)
        )
        texts, problems, names = [], 0, []
        for each in calls:
            if isinstance(each, str):  # the message about a malformed call
                texts.append(each)
                problems += 1
                continue
            result = next(results)
            if result.ends_episode:
                return await self._finish(result.content)
            texts.append(result.content)
            problems += result.problem is not None
            names.append(each.name)
        observation = "\n".join(f"<tool_response>\n{each}\n</tool_response>" for each in texts)
        return self._continue(observation, ", ".join(names) or None, problems=problems, calls=len(written))

    def _parse_call(self, written: str) -> ToolCall | str:
        """The call, or the message about a malformed one."""
        try:
            call = msgspec.json.decode(written, type=_TextCall)
        except msgspec.MsgspecError:
            return self._toolbox.unreadable(written.strip())
        self._calls += 1
        return ToolCall(f"call-{self._calls}", call.name, bytes(call.arguments).decode())

    def _continue(self, observation: str, action: str | None, *, problems: int, calls: int) -> Step:
        info: Info = {
            "action": action,
            "valid": not problems,
            "penalty": self._format_penalty if problems else 0.0,
            "success": False,
            "metrics": {"tool_calls": calls, "tool_problems": problems if calls else 0},
        }
        return Step(observation, 0.0, terminated=False, truncated=False, info=info)

    async def _finish(self, answer: str) -> Step:
        assert self._task is not None
        scored = self._score(self._task, answer)
        value = reward_of(await scored if isawaitable(scored) else scored, "the score of an answer")
        self._end()
        info: Info = {"action": answer, "valid": True, "success": value >= SOLVED}
        return Step("", value, terminated=True, truncated=False, info=info)

    def _end(self) -> None:
        self._task = None
        if self._context is not None:
            self._context.close()
            self._context = None
