"""Builds the tools of agents from the configuration, and closes their resources.

Invariants: agents whose tools have equal settings share the tool, with its limits and its pool. Nothing starts before a
call needs it; `close` ends everything.
"""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollwright.errors import ConfigError, RollwrightError
from rollwright.tools import Tool, Toolbox
from rollwright.tools.bash import bash_tool
from rollwright.tools.calculator import calculator
from rollwright.tools.settings import (
    TOOLS,
    AnyToolConfig,
    BashToolConfig,
    CalculatorToolConfig,
    OwnToolConfig,
    PythonToolConfig,
    SearchToolConfig,
)


class ToolShelf:
    """The tools of one run in one process."""

    def __init__(self) -> None:
        self._made: dict[AnyToolConfig, Sequence[Tool]] = {}
        self._checks: list[Callable[[], Awaitable[None]]] = []
        self._closers: list[Callable[[], Awaitable[None]]] = []

    def toolbox(self, wanted: Sequence[AnyToolConfig], where: str) -> Toolbox:
        """Tools of one agent; errors name their place in the settings."""
        tools: list[Tool] = []
        for place, each in enumerate(wanted):
            if each not in self._made:
                self._made[each] = self._make(each, f"{where}.{place}")
            tools += self._made[each]
        try:
            return Toolbox(tools)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    async def check(self) -> None:
        """Raise an error if this machine lacks something that a tool needs."""
        for check in self._checks:
            await check()

    async def close(self) -> None:
        for close in self._closers:
            await close()

    def _make(self, config: AnyToolConfig, where: str) -> Sequence[Tool]:
        match config:
            case BashToolConfig():
                tools: Sequence[Tool] = [bash_tool(config)]
            case CalculatorToolConfig():
                tools = [calculator]
            case PythonToolConfig():
                tools = [self._python(config)]
            case SearchToolConfig():
                tools = [self._search(config, where)]
            case OwnToolConfig():
                tools = _own(config.function, f"{where}.function")
        return [each.with_limits(config.time_limit, config.concurrency) for each in tools]

    def _python(self, config: PythonToolConfig) -> Tool:
        from rollwright.tools.python import PythonSandbox

        sandbox = PythonSandbox(config)
        self._checks.append(sandbox.check)
        self._closers.append(sandbox.close)
        return sandbox.tool()

    def _search(self, config: SearchToolConfig, where: str) -> Tool:
        from rollwright.tools.search import Bm25Index, HttpSearch, search_tool

        if config.url is not None:
            server = HttpSearch(config.url)
            self._closers.append(server.close)
            return search_tool(server)
        try:
            return search_tool(Bm25Index(_passages(Path(config.passages or ""), f"{where}.passages")))
        except ImportError as error:
            raise ConfigError(f"{where}: search needs {error.name}; install rollwright[tools]") from error


def _passages(file: Path, where: str) -> list[Any]:
    from rollwright.tools.search import Passage

    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{where}: {file}: cannot be read: {error.strerror}") from error
    try:
        return [msgspec.json.decode(line, type=Passage) for line in lines if line.strip()]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{where}: {file}: every line must be JSON with `text`: {error}") from error


def _own(path: str, where: str) -> Sequence[Tool]:
    try:
        found: Any = TOOLS.find(path)
    except RollwrightError as error:
        raise ConfigError(f"{where}: {error}") from error
    if callable(found) and not isinstance(found, Tool):
        with TOOLS.blame(path):
            found = found()
    tools = [found] if isinstance(found, Tool) else found
    if not isinstance(tools, list | tuple) or not all(isinstance(each, Tool) for each in tools):
        raise ConfigError(
            f"{where}: {path!r} is no tool; expected a function with @tool, or a function that returns one"
        )
    return tools
