"""One agent of a team: its prompt templates, how its completion is parsed, its sampling and its tools."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from rollwright.engines.base import Sampling, ToolSpec
from rollwright.errors import ConfigError
from rollwright.teams.parsing import ReadingRule, VerdictRule
from rollwright.teams.settings import SamplingChanges
from rollwright.tools import Toolbox
from rollwright.trajectory import Message

PLACEHOLDERS = (
    "instruction",
    "question",
    "observation",
    "history",
    "context",
    "step",
    "max_steps",
    "steps_left",
)
"""Placeholders of a template. `question` is the first observation, `observation` the latest one, `history` the actions
and observations between them, `context` the answers of the other agents in this step."""


def agent_id(team: str, agent: str) -> str:
    """Name of an agent in trajectories. It contains the team, because two teams may have an agent of the same name."""
    return f"{team}/{agent}"


@dataclass(frozen=True)
class TeamAgent:
    """Settings of one agent. Immutable: the state of an episode is in the session."""

    system: str
    """Template of its system prompt."""
    prompt: str
    """Template of the user message."""
    again: str | None = None
    """Template of the user message when the agent is called again in the same episode: the prompt then continues the
    agent's previous turn. `None`: every call starts a new conversation and a new token sequence."""
    reading: ReadingRule = field(default_factory=ReadingRule)
    verdict: VerdictRule | None = None
    """How to read the verdict of an agent that judges; `None`: the agent gives none."""
    shares: bool = True
    """Whether agents that are called later in the same step see its answer."""
    trainable: bool = True
    """False: the agent is frozen, and its tokens are masked out of the loss."""
    invalid_penalty: float = 0.0
    """Penalty, zero or negative, on a call whose completion does not have the required format; separate from the reward."""
    sampling: SamplingChanges = field(default_factory=SamplingChanges)
    toolbox: Toolbox | None = None
    """Tools that it may call before it answers. The tool calls of one completion run concurrently, and their results are
    its next prompt. A tool that would end the episode ends this agent's call instead; its result is the answer."""
    max_tool_turns: int = 8
    """Limit of completions in one call. If the last of them still calls a tool, the call has no answer and is invalid."""

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return () if self.toolbox is None else self.toolbox.specs

    @cached_property
    def _changes(self) -> dict[str, Any]:
        """The sampling parameters that are set; read once, because every call needs them."""
        return {name: value for name, value in self.sampling if value is not None}

    def override(self, sampling: Sampling) -> Sampling:
        """Overrides the run's sampling parameters with those that the agent sets."""
        return msgspec.structs.replace(sampling, **self._changes) if self._changes else sampling

    def check(self, where: str) -> None:
        """Validates templates and limits; a `ConfigError` names the wrong field."""
        for name, template in (("system", self.system), ("prompt", self.prompt), ("again", self.again or "")):
            try:
                template.format_map(dict.fromkeys(PLACEHOLDERS, ""))
            except (KeyError, IndexError, ValueError) as error:
                known = ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
                raise ConfigError(
                    f"{where}.{name}: {error} cannot be filled in; known placeholders: {known}; "
                    "{{ and }} stand for plain braces"
                ) from error
        if self.max_tool_turns < 1:
            raise ConfigError(
                f"{where}.max_tool_turns: {self.max_tool_turns} is too few; accepted: 1 or more"
            )
        if self.invalid_penalty > 0:
            raise ConfigError(
                f"{where}.invalid_penalty: {self.invalid_penalty} is a reward; accepted: 0 or less"
            )

    def messages(self, values: Mapping[str, object], context: str, again: bool = False) -> list[Message]:
        """The messages of one call, with the team's context inserted where the template has `{context}`."""
        filled = {**values, "context": context}
        if again and self.again is not None:
            return [Message("user", self.again.format_map(filled))]
        opening = [Message("system", self.system.format_map(filled))] if self.system else []
        return [*opening, Message("user", self.prompt.format_map(filled))]
