"""Runs the tool calls of one turn concurrently; a model's mistakes become observations.

Always true: every call gets exactly one result, in the order of the calls, and the text of a problem says what would be
accepted. The only exception that propagates is `ToolFailure`, for a tool that cannot be run through no fault of the model.
After it, and on cancellation, the other calls of the turn are cancelled and awaited.
"""

import asyncio
import difflib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rollwright.aio import is_cancellation, together
from rollwright.engines.base import ToolSpec
from rollwright.errors import ConfigError
from rollwright.tools.context import ToolContext
from rollwright.tools.result import EndEpisode, Problem, ToolError, ToolFailure, ToolResult, as_text
from rollwright.tools.schema import BadArguments
from rollwright.tools.time_limit import CallTimer, QueueObserver, use_timer
from rollwright.tools.tool import Tool, ToolTimeout
from rollwright.trajectory import ToolCall

_QUOTED = 200
"""Characters of a malformed call that are quoted to the model."""


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
        """Specs of all tools, in order."""
        return tuple(each.spec for each in self._tools.values())

    @property
    def stateful(self) -> bool:
        """Whether any tool keeps state between calls."""
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
        """Runs the calls of one turn and returns their results in order. Each call runs inside the context manager
        `around(call)`; its value is notified while the call is queued if it is a `QueueObserver`."""

        async def run_timed(call: ToolCall) -> ToolResult:
            with (
                around(call) as value,
                use_timer(CallTimer(value if isinstance(value, QueueObserver) else None)),
            ):
                return await self.run_one(call, context)

        return await together(run_timed(call) for call in calls)

    async def run_one(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Validates and runs one call."""
        tool = self._tools.get(call.name)
        if tool is None:
            return ToolResult(call, self._describe_unknown(call.name), problem=Problem.UNKNOWN_TOOL)
        try:
            arguments = tool.read(call.arguments)
        except BadArguments as error:
            text = f"{call.name}: wrong arguments: {error}. It takes: {_describe_parameters(tool.spec)}."
            return ToolResult(call, text, problem=Problem.BAD_ARGUMENTS)
        return await _run_tool(tool, call, arguments, context)

    def unreadable(self, text: str) -> str:
        """Message for the model about a malformed call."""
        quoted = text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"
        return f"A tool call could not be read: {quoted!r}. Tools: {self._names()}."

    def _describe_unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._tools, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        return f"There is no tool {name!r}{meant} Tools: {self._names()}."

    def _names(self) -> str:
        return ", ".join(self._tools) or "none"


async def _run_tool(
    tool: Tool, call: ToolCall, arguments: dict[str, Any], context: ToolContext
) -> ToolResult:
    clock = asyncio.get_running_loop().time
    queued = clock()
    await tool.enter()
    began = clock()

    def result(
        content: str, problem: Problem | None = None, value: Any = None, ends: bool = False
    ) -> ToolResult:
        return ToolResult(call, content, value, problem, ends, clock() - began, began - queued)

    try:
        value = await tool.call(arguments, context)
        ends = tool.ends_episode or isinstance(value, EndEpisode)
        value = value.result if isinstance(value, EndEpisode) else value
        return result(as_text(value, tool.max_length), None, value, ends)
    except ToolFailure:
        raise
    except ToolError as error:
        return result(as_text(str(error), tool.max_length), Problem.EXCEPTION)
    except ToolTimeout as error:
        return result(str(error), Problem.TIMEOUT)
    except BaseException as error:
        if is_cancellation(error):
            raise
        text = as_text(f"{tool.name} failed: {type(error).__name__}: {error}", tool.max_length)
        return result(text, Problem.EXCEPTION)


def _describe_parameters(spec: ToolSpec) -> str:
    """Names and types of the parameters, in one line."""
    required = spec.parameters.get("required", ())
    parts = []
    for name, about in spec.parameters.get("properties", {}).items():
        optional = "" if name in required else ", optional"
        parts.append(f"{name} ({_type_name(about)}{optional})")
    return ", ".join(parts) or "nothing"


def _type_name(about: dict[str, Any]) -> str:
    if "enum" in about:
        return "one of " + ", ".join(map(repr, about["enum"]))
    if "anyOf" in about:
        return " or ".join(_type_name(each) for each in about["anyOf"])
    if "$ref" in about:
        return str(about["$ref"]).rpartition("/")[2]
    if about.get("type") == "array":
        return f"array of {_type_name(about['items'])}" if "items" in about else "array"
    return str(about.get("type", "anything"))
