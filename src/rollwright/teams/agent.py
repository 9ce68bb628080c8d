"""One agent of a team, as plain data: what it is told, how its answer is read, who answers for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
"""What a template may refer to. `question` is what the environment showed first, `observation` what it showed last,
`history` the actions and observations between them, `context` what the others have said in this step."""


def agent_id(team: str, agent: str) -> str:
    """An agent's name in trajectories: two teams may have an agent of the same name."""
    return f"{team}/{agent}"


def changed_sampling(sampling: Sampling, changes: SamplingChanges) -> Sampling:
    """The run's sampling with an agent's own settings over it."""
    changed = {name: value for name, value in changes if value is not None}
    return msgspec.structs.replace(sampling, **changed) if changed else sampling


@dataclass(frozen=True)
class TeamAgent:
    """Holds no state of an episode."""

    system: str
    """Template of its system prompt."""
    prompt: str
    """Template of the message that asks it."""
    again: str | None = None
    """Template of the message when it is asked again in the same episode: its prompt then continues its own earlier
    turn. `None`: every call starts a conversation, and a token sequence, of its own."""
    reading: ReadingRule = field(default_factory=ReadingRule)
    verdict: VerdictRule | None = None
    """For an agent that judges."""
    shares: bool = True
    """Whether the agents after it, in the same step, see its answer."""
    trainable: bool = True
    """False: frozen, its tokens are never in the loss."""
    invalid_penalty: float = 0.0
    """Zero or negative: what a call without the asked-for form costs, on that call, apart from the reward."""
    sampling: SamplingChanges = field(default_factory=SamplingChanges)
    toolbox: Toolbox | None = None
    """What it may call before it answers. The calls of one completion run side by side, and it is asked again with what
    they came to; a tool that ends the episode ends its call instead, with the result as its answer."""
    max_tool_turns: int = 8
    """Completions of one call; one that still calls tools then has no answer, and is invalid."""

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return () if self.toolbox is None else self.toolbox.specs

    def check(self, where: str) -> None:
        """Raises a `ConfigError` that names what is wrong."""
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
        """What it is asked, with the context put where its template wants it."""
        filled = {**values, "context": context}
        if again and self.again is not None:
            return [Message("user", self.again.format_map(filled))]
        opening = [Message("system", self.system.format_map(filled))] if self.system else []
        return [*opening, Message("user", self.prompt.format_map(filled))]
