"""What an agent may call, one model for each kind of tool; `kind` chooses. A name alone takes every default."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rollwright.registry import Registry
from rollwright.settings import EngineUrl, Settings, choose_kinds

TOOLS: Registry[Any] = Registry(
    "tools",
    "tool",
    {
        "calculator": "rollwright.tools.calculator:calculator",
        "python": "rollwright.tools.python:PythonSandbox",
        "search": "rollwright.tools.search:search_tool",
    },
    protocol="rollwright.tools.tool:Tool",
    key="orchestras.TAG.agents.NAME.tools",
)


class ToolConfig(Settings):
    """What all tools share. Agents whose tools have the same settings share what those hold."""

    time_limit: PositiveFloat | None = None
    """Seconds that a call may take. Unset: the tool's own limit."""
    concurrency: PositiveInt | None = None
    """Calls that run at the same time in one process, of all rollouts together. Unset: the tool's own limit."""


class CalculatorToolConfig(ToolConfig):
    """Sums, without evaluating code."""

    kind: Literal["calculator"]
    """Chooses this tool."""


class PythonToolConfig(ToolConfig):
    """Python in a sandbox."""

    kind: Literal["python"]
    """Chooses this tool."""
    stateful: bool = True
    """Whether a rollout keeps one sandbox, with its variables. False: every call has a new one."""
    size: PositiveInt = 64
    """Sandboxes at the same time in one process; more wait."""
    seconds: PositiveFloat = 10.0
    """For one execution."""
    memory_mb: PositiveInt = 512
    """Memory of one sandbox."""
    allow_unconfined: bool = False
    """True: where the machine cannot lock code in, limits alone have to do. False: the run does not start there."""
    sandbox: str = "process"
    """What the code is locked in by: `process`, or a sandbox of one's own as `module:name`."""


class SearchToolConfig(ToolConfig):
    """Search in texts, by words (BM25) in a file of one's own, or by a server."""

    kind: Literal["search"]
    """Chooses this tool."""
    passages: str | None = None
    """File of JSON lines, each with `text` and, if there is one, `title`."""
    url: EngineUrl | None = None
    """A search server; see the page about tools for what it is asked and answers."""

    @model_validator(mode="after")
    def _fits(self) -> "SearchToolConfig":
        if (self.passages is None) == (self.url is None):
            raise ValueError("passages: either this or url is needed, and not both")
        return self


class OwnToolConfig(ToolConfig):
    """A tool of one's own."""

    kind: Literal["own"]
    """Chooses this tool."""
    function: str
    """As `module:name`: what `@tool` made, or a function that gives it, or a list of several."""


AnyToolConfig = Annotated[
    CalculatorToolConfig | PythonToolConfig | SearchToolConfig | OwnToolConfig, Field(discriminator="kind")
]


def tools_by_name(value: Any) -> Any:
    """A tool that is given by its name alone has every default; a path is one's own."""
    return choose_kinds(value, TOOLS, "function")
