"""Plain data: what a tool call came to."""

from enum import StrEnum
from typing import Any

import msgspec
from pydantic_core import to_json

from rollwright.errors import RollwrightError
from rollwright.trajectory import Message, ToolCall


class Problem(StrEnum):
    """Why a call gave no result. Each is an observation for the model, which may do better next time."""

    UNKNOWN_TOOL = "unknown_tool"
    """No tool has that name."""
    BAD_ARGUMENTS = "bad_arguments"
    """The arguments are not JSON, or not what the tool takes."""
    EXCEPTION = "exception"
    """The tool raised."""
    TIMEOUT = "timeout"
    """The tool took longer than its time limit."""
    MALFORMED = "malformed"
    """It looks like a call and cannot be read as one."""


class ToolFailure(RollwrightError):
    """A tool could not be run at all, for a reason that is not the model's doing; ends the attempt."""


class ToolError(RollwrightError):
    """A tool raises it to tell the model something in its own words; any other exception is told with its name."""


class EndEpisode:
    """A tool returns its result in this to end the episode with it."""

    __slots__ = ("result",)

    def __init__(self, result: Any = None) -> None:
        self.result = result


class ToolResult(msgspec.Struct, frozen=True):
    """What one call came to."""

    call: ToolCall
    content: str
    """What the model is told: the result as text, or what was wrong."""
    value: Any = None
    """The result as the tool returned it; `None` where there was a problem, or it comes from a journal."""
    problem: Problem | None = None
    ends_episode: bool = False
    seconds: float = 0.0
    """Running, without waiting for the tool's concurrency limit."""
    waited: float = 0.0
    """Seconds of waiting for it."""

    def message(self) -> Message:
        return Message("tool", self.content, tool_call_id=self.call.id, name=self.call.name)


def as_text(value: Any, max_length: int) -> str:
    """A string as it is, nothing as nothing, everything else as JSON; what is too long is cut, and says so."""
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
