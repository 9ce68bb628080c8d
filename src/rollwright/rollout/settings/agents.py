"""Settings of agents that play tasks: functions, commands, the model in a terminal, programs on the command line, remote programs."""

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
)

from rollwright.registry import Registry
from rollwright.settings import Settings

CLI_AGENTS: Registry[Any] = Registry(
    "cli_agents",
    "agent cli",
    {
        "claude-code": "rollwright.rollout.cli_agents.recipes:CLAUDE_CODE",
        "codex": "rollwright.rollout.cli_agents.recipes:CODEX",
        "gemini-cli": "rollwright.rollout.cli_agents.recipes:GEMINI_CLI",
        "mini-swe-agent": "rollwright.rollout.cli_agents.recipes:MINI_SWE_AGENT",
        "opencode": "rollwright.rollout.cli_agents.recipes:OPENCODE",
        "qwen-code": "rollwright.rollout.cli_agents.recipes:QWEN_CODE",
    },
    protocol="rollwright.rollout.cli_agents.recipe:CliRecipe",
    key="custom_envs.TAG.agent.cli",
)


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


class CliAgentConfig(Settings):
    """An agent on the command line, such as Claude Code: installed once, and run in the attempt's box for each rollout. See
    [agents on the command line](cli_agents.md)."""

    kind: Literal["cli"] = "cli"
    """Chooses this agent."""
    cli: str
    """`claude-code`, `codex`, `gemini-cli`, `mini-swe-agent`, `opencode`, `qwen-code`, or a recipe of your own as
    `module:name`."""
    timeout: PositiveFloat | None = None
    """Seconds after which it is killed, which is a failure. Unset: the task's own limit, else 1800."""
    output_kb: PositiveInt = 64
    """How much of the end of its output is kept."""
    network: Literal["gateway", "box"] = "gateway"
    """What it may reach: the model alone, or also what the box or the task allows."""
    arguments: tuple[str, ...] = ()
    """Further arguments behind those of the recipe."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables."""
    prompt: str | None = None
    """How a task is told, with its fields in braces: `{instruction}`. Unset: its instruction alone."""


class SolutionAgentConfig(Settings):
    """No agent: `oracle` runs the task's own solution, `nop` does nothing. For environments with boxes, as a check of their
    tasks. The name alone in place of the section does the same."""

    kind: Literal["oracle", "nop"]
    """Chooses one of them."""


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
    FunctionAgentConfig
    | CommandAgentConfig
    | RemoteAgentConfig
    | TerminalAgentConfig
    | CliAgentConfig
    | SolutionAgentConfig,
    Field(discriminator="kind"),
]
