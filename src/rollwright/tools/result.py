"""Plain data: results and failures of tool calls."""

from enum import StrEnum
from typing import Any

import msgspec
from pydantic_core import to_json

from rollwright.errors import RollwrightError
from rollwright.trajectory import Message, ToolCall


class Problem(StrEnum):
    """Why a call has no result. Each is reported to the model as an observation."""

    UNKNOWN_TOOL = "unknown_tool"
    """No tool has that name."""
    BAD_ARGUMENTS = "bad_arguments"
    """The arguments are not JSON, or do not match the tool's schema."""
    EXCEPTION = "exception"
    """The tool raised."""
    TIMEOUT = "timeout"
    """The tool took longer than its time limit."""
    MALFORMED = "malformed"
    """The text resembles a call but cannot be parsed."""


class ToolFailure(RollwrightError):
    """A tool could not be run for a reason that the model did not cause; fails the attempt."""


class ToolError(RollwrightError):
    """Raised by a tool to give the model an error message verbatim; other exceptions are prefixed with their class."""


class EndEpisode:
    """Return value of a tool that ends the episode with `result`."""

    __slots__ = ("result",)

    def __init__(self, result: Any = None) -> None:
        self.result = result


class ToolResult(msgspec.Struct, frozen=True):
    """Result of one call."""

    call: ToolCall
    content: str
    """Text for the model: the result or the problem."""
    value: Any = None
    """The tool's return value; `None` after a problem, or if the result comes from the journal."""
    problem: Problem | None = None
    ends_episode: bool = False
    seconds: float = 0.0
    """Run time, without the wait for the tool's concurrency limit."""
    waited: float = 0.0
    """Seconds in the queue of the concurrency limit."""

    def message(self) -> Message:
        """The chat message that answers the call."""
        return Message("tool", self.content, tool_call_id=self.call.id, name=self.call.name)


def as_text(value: Any, max_length: int) -> str:
    """Text of a result: a string unchanged, `None` as the empty string, other values as JSON; truncated with a note."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if value is None:
        text = ""
    elif isinstance(value, str):
        text = value
    else:
        text = to_json(value, fallback=str, inf_nan_mode="constants").decode()
    if len(text) <= max_length:
        return text
    return f"{text[:max_length]}\n[cut: {len(text) - max_length} more characters]"
