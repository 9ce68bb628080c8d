"""Settings of agents that play tasks: functions, commands, the model in a terminal, remote programs."""

from typing import Annotated, Literal

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
)

from rollwright.settings import Settings


class FunctionAgentConfig(Settings):
    """A function of one's own that plays a task. `module:function` in place of the section does the same."""

    kind: Literal["function"] = "function"
    """Chooses this agent."""
    function: str
    """As `module:function`, or the name that an installed package offers it by. Called with the task and a session; async or
    plain."""
    process: bool = False
    """Whether each call has a process of its own, with `OPENAI_BASE_URL` and the other usual variables set before the module
    is imported. Unset: it runs in the worker, where only `session.base_url` leads to the model."""


class CommandAgentConfig(Settings):
    """A command that plays a task: an agent in any language, started anew for each rollout in a folder of its own."""

    kind: Literal["command"] = "command"
    """Chooses this agent."""
    command: Annotated[list[str], Field(min_length=1)]
    """Program and arguments. A word that names a file in `folder` is given as its whole path."""
    timeout: PositiveFloat = 600.0
    """Seconds after which it is killed, which is a failure."""
    output_kb: PositiveInt = 64
    """How much of the end of its output is kept."""


class TerminalAgentConfig(Settings):
    """The model itself, working in the attempt's box by commands in plain text. See [boxes](boxes.md)."""

    kind: Literal["terminal"] = "terminal"
    """Chooses this agent."""
    max_turns: PositiveInt = 30
    """Answers until the episode ends."""
    seconds: PositiveFloat = 120.0
    """Time limit of a command."""
    output_limit: PositiveInt = 8000
    """Characters of a command's output that the model sees."""
    system: str | None = None
    """System prompt. Unset: one that explains the format."""


class RemoteAgentConfig(Settings):
    """Programs anywhere that take the tasks from the run by HTTP. `remote` in place of the section does the same."""

    kind: Literal["remote"]
    """Chooses this agent."""
    lease_seconds: PositiveFloat = 120.0
    """Seconds without a model call or a heartbeat after which a program has lost its rollout, which is a failure."""


class RemoteConfig(Settings):
    """Where remote programs reach the run. The variable `ROLLWRIGHT_GATEWAY_KEY` holds the key that they need."""

    host: str = "127.0.0.1"
    """Address to listen on. One that other machines can reach needs the key to be set."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8810
    """Port; 0 takes a free one."""
    public_url: str | None = None
    """Address by which programs reach it, if not host and port."""


AgentChoice = Annotated[
    FunctionAgentConfig | CommandAgentConfig | RemoteAgentConfig | TerminalAgentConfig,
    Field(discriminator="kind"),
]
