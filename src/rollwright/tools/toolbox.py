"""Runs the calls of one turn side by side; whatever a model got wrong becomes an observation.

Always true: every call gets exactly one result, in the order of the calls; what was wrong says what would be right. The
one exception that leaves is `ToolFailure`: a tool that cannot be run at all is no fault of the model's. Then, and on
cancellation, the other calls of the turn are cancelled and have ended.
"""

import asyncio
import difflib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rollwright.aio import is_cancellation
from rollwright.engines.base import ToolSpec
from rollwright.errors import ConfigError
from rollwright.tools.context import ToolContext
from rollwright.tools.result import EndEpisode, Problem, ToolError, ToolFailure, ToolResult, as_text
from rollwright.tools.schema import BadArguments
from rollwright.tools.time_limit import CallTime, NotesLines, timed
from rollwright.tools.tool import TookTooLong, Tool
from rollwright.trajectory import ToolCall

_SHOWN = 200
"""Characters of an unreadable call that the model is shown again."""


class Toolbox:
    """The tools of an agent."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools: dict[str, Tool] = {}
        for each in tools:
            if each.name in self._tools:
                raise ConfigError(f"two tools are named {each.name!r}; give one another name")
            self._tools[each.name] = each

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(each.spec for each in self._tools.values())

    @property
    def stateful(self) -> bool:
        """Whether any of them holds something from one call to the next."""
        return any(each.stateful for each in self._tools.values())

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    async def run(
        self,
        calls: Sequence[ToolCall],
        context: ToolContext,
        around: Callable[[ToolCall], AbstractContextManager[Any]] = nullcontext,
    ) -> list[ToolResult]:
        """The results of one turn's calls, in their order; each is made inside what `around` gives for it, which is told
        when the call is in line, where it wants to know (`NotesLines`)."""

        async def one(call: ToolCall) -> ToolResult:
            with around(call) as noted, timed(CallTime(noted if isinstance(noted, NotesLines) else None)):
                return await self.run_one(call, context)

        if len(calls) == 1:
            return [await one(calls[0])]
        tasks = [asyncio.ensure_future(one(call)) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            if not all(task.done() for task in tasks):
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def run_one(self, call: ToolCall, context: ToolContext) -> ToolResult:
        tool = self._tools.get(call.name)
        if tool is None:
            return ToolResult(call, self._unknown(call.name), problem=Problem.UNKNOWN_TOOL)
        try:
            arguments = tool.read(call.arguments)
        except BadArguments as error:
            told = f"{call.name}: wrong arguments: {error}. It takes: {_takes(tool.spec)}."
            return ToolResult(call, told, problem=Problem.BAD_ARGUMENTS)
        return await _ran(tool, call, arguments, context)

    def unreadable(self, text: str) -> str:
        """What a model is told of something that looks like a call and is none."""
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        return f"A tool call could not be read: {shown!r}. Tools: {self._names()}."

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._tools, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        return f"There is no tool {name!r}{meant} Tools: {self._names()}."

    def _names(self) -> str:
        return ", ".join(self._tools) or "none"


async def _ran(tool: Tool, call: ToolCall, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
    clock = asyncio.get_running_loop().time
    asked = clock()
    await tool.enter()
    began = clock()

    def result(
        content: str, problem: Problem | None = None, value: Any = None, ends: bool = False
    ) -> ToolResult:
        return ToolResult(call, content, value, problem, ends, clock() - began, began - asked)

    try:
        value = await tool.call(arguments, context)
        ends = tool.ends_episode or isinstance(value, EndEpisode)
        value = value.result if isinstance(value, EndEpisode) else value
        return result(as_text(value, tool.max_length), None, value, ends)
    except ToolFailure:
        raise
    except ToolError as error:
        return result(as_text(str(error), tool.max_length), Problem.EXCEPTION)
    except TookTooLong as error:
        return result(str(error), Problem.TIMEOUT)
    except BaseException as error:
        if is_cancellation(error):
            raise
        told = as_text(f"{tool.name} failed: {type(error).__name__}: {error}", tool.max_length)
        return result(told, Problem.EXCEPTION)


def _takes(spec: ToolSpec) -> str:
    """The arguments in short."""
    required = spec.parameters.get("required", ())
    parts = []
    for name, about in spec.parameters.get("properties", {}).items():
        optional = "" if name in required else ", optional"
        parts.append(f"{name} ({_kind(about)}{optional})")
    return ", ".join(parts) or "nothing"


def _kind(about: dict[str, Any]) -> str:
    if "enum" in about:
        return "one of " + ", ".join(map(repr, about["enum"]))
    if "anyOf" in about:
        return " or ".join(_kind(each) for each in about["anyOf"])
    if "$ref" in about:
        return str(about["$ref"]).rpartition("/")[2]
    if about.get("type") == "array":
        return f"array of {_kind(about['items'])}" if "items" in about else "array"
    return str(about.get("type", "anything"))
