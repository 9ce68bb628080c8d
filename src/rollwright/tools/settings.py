"""Settings of tools: one model per kind, chosen by `kind`. A name alone selects all defaults."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rollwright.registry import Registry
from rollwright.settings import EngineUrl, Settings, choose_kinds

TOOLS: Registry[Any] = Registry(
    "tools",
    "tool",
    {
        "bash": "rollwright.tools.bash:bash_tool",
        "calculator": "rollwright.tools.calculator:calculator",
        "python": "rollwright.tools.python:PythonSandbox",
        "search": "rollwright.tools.search:search_tool",
    },
    protocol="rollwright.tools.tool:Tool",
    key="orchestras.TAG.agents.NAME.tools",
)


class ToolConfig(Settings):
    """Settings of all tools. Agents whose tools have equal settings share their resources."""

    time_limit: PositiveFloat | None = None
    """Time limit of a call in seconds. Unset: the tool's own limit."""
    concurrency: PositiveInt | None = None
    """Concurrent calls in one process, over all rollouts. Unset: the tool's own limit."""


class BashToolConfig(ToolConfig):
    """Commands in the box of the attempt, which `custom_envs.TAG.box` describes."""

    kind: Literal["bash"]
    """Chooses this tool."""
    seconds: PositiveFloat = 120.0
    """Time limit of one command."""
    max_output: PositiveInt = 8000
    """Characters of a command's output that the model sees."""


class CalculatorToolConfig(ToolConfig):
    """Arithmetic, without evaluating code."""

    kind: Literal["calculator"]
    """Chooses this tool."""


class PythonToolConfig(ToolConfig):
    """Python in a sandbox."""

    kind: Literal["python"]
    """Chooses this tool."""
    stateful: bool = True
    """Whether a rollout keeps one sandbox, with its variables. False: every call gets a new one."""
    size: PositiveInt = 64
    """Sandboxes at the same time in one process; further calls wait."""
    seconds: PositiveFloat = 10.0
    """Time limit of one execution."""
    memory_mb: PositiveInt = 512
    """Memory of one sandbox."""
    allow_unconfined: bool = False
    """True: a machine that cannot confine code runs it with resource limits only. False: the run does not start there."""
    sandbox: str = "process"
    """Sandbox backend: `process`, or your own as `module:name`."""


class SearchToolConfig(ToolConfig):
    """Text search: BM25 over a file, or a search server."""

    kind: Literal["search"]
    """Chooses this tool."""
    passages: str | None = None
    """JSON Lines file; each line has `text` and optionally `title`."""
    url: EngineUrl | None = None
    """Address of a search server; the page about tools describes its protocol."""

    @model_validator(mode="after")
    def _check_source(self) -> "SearchToolConfig":
        if (self.passages is None) == (self.url is None):
            raise ValueError("passages: either this or url is needed, and not both")
        return self


class OwnToolConfig(ToolConfig):
    """Your own tool."""

    kind: Literal["own"]
    """Chooses this tool."""
    function: str
    """`module:name` of a tool made by `@tool`, of a function that returns one, or of a list of several."""


AnyToolConfig = Annotated[
    BashToolConfig | CalculatorToolConfig | PythonToolConfig | SearchToolConfig | OwnToolConfig,
    Field(discriminator="kind"),
]


def tools_by_name(value: Any) -> Any:
    """Expands a tool that is given by name alone to its settings; a `module:name` path becomes kind `own`."""
    return choose_kinds(value, TOOLS, "function")
