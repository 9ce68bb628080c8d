"""Settings of agents that play environments."""

from enum import StrEnum
from typing import Any

from pydantic import PositiveInt, model_validator

from rollwright.registry import Registry
from rollwright.settings import Settings

AGENTS: Registry[Any] = Registry(
    "agents",
    "agent",
    {},
    protocol="rollwright.rollout.function:AgentFunction",
    key="rollwright worker --agent",
)
"""Agents with their own control flow: functions of a task and a session that a worker calls for each rollout."""


class HistoryMode(StrEnum):
    """Which part of the episode so far is in the prompt."""

    WHOLE = "whole"
    """Everything, as one growing token sequence."""
    WINDOW = "window"
    """The last turns, unchanged."""
    ACTIONS = "actions"
    """Only actions and observations of earlier turns, without the reasoning around an action."""
    CURRENT = "current"
    """Nothing: each prompt is the opening template with the current state."""


class History(Settings):
    """Which part of the episode so far is in the prompt. Every mode but `whole` starts a new token sequence each turn."""

    mode: HistoryMode = HistoryMode.WHOLE
    """`whole`: everything. `window`: the last `length` turns. `actions`: only actions and observations of earlier turns,
    without the reasoning. `current`: only the current state, in the opening template."""
    length: PositiveInt | None = None
    """Number of earlier turns to keep; required for `window`, optional for `actions`."""

    @model_validator(mode="after")
    def _fits(self) -> "History":
        if self.mode == "window" and self.length is None:
            raise ValueError("length: a window needs the number of earlier turns to keep")
        if self.mode in ("whole", "current") and self.length is not None:
            raise ValueError(f"length: history `{self.mode}` has none; use mode `window` to limit it")
        return self
