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
"""Agents that bring their own control flow: async functions of a task, which a worker calls for each rollout."""


class HistoryMode(StrEnum):
    """What of the episode so far the model sees."""

    WHOLE = "whole"
    """Everything, as one growing token sequence."""
    WINDOW = "window"
    """The last turns, as they were."""
    ACTIONS = "actions"
    """Of earlier turns only actions and observations; the reasoning around an action is left out."""
    CURRENT = "current"
    """Nothing: each turn asks with the opening's words and the state as it is now."""


class History(Settings):
    """What of the episode so far the model sees. Anything but `whole` starts a new token sequence each turn."""

    mode: HistoryMode = HistoryMode.WHOLE
    """`whole`: everything. `window`: the last `length` turns. `actions`: of earlier turns only the actions and
    observations, without the reasoning around them. `current`: nothing but the state now, in the opening's words."""
    length: PositiveInt | None = None
    """Earlier turns that are kept; needed for `window`, optional for `actions`."""

    @model_validator(mode="after")
    def _fits(self) -> "History":
        if self.mode == "window" and self.length is None:
            raise ValueError("length: a window needs the number of earlier turns to keep")
        if self.mode in ("whole", "current") and self.length is not None:
            raise ValueError(f"length: history `{self.mode}` has none; use mode `window` to limit it")
        return self
