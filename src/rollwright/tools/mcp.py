"""The tools of any MCP server: a command that speaks over its standard input and output, or an HTTP address.

A connection is kept by a task of its own, because it has to be closed by the task that opened it. Shared, all rollouts
use one connection; otherwise each rollout leases one, and so has a server process or HTTP session to itself. A tool's
own error is an observation; a connection that is lost ends the attempt, and the next call makes a new one.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from rollwright.engines.base import ToolSpec
from rollwright.errors import ConfigError
from rollwright.tools.context import ToolContext
from rollwright.tools.pool import Key, Lease, Pool
from rollwright.tools.result import ToolError, ToolFailure
from rollwright.tools.schema import BadArguments
from rollwright.tools.tool import TIME_LIMIT, Tool

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

CONNECT_SECONDS = 60.0
"""For starting a server and greeting it."""

_CONNECTION_CLOSED = -32000
"""The error code by which the package says that a request's connection has ended."""


class McpServer:
    """One server, by command or by address."""

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        is_shared: bool = True,
        size: int = 64,
        time_limit: float = TIME_LIMIT,
    ) -> None:
        """`server` is an address (`http://...`) or the words of a command, which gets only `environment` beside the
        package's few defaults. With `is_shared` off, at most `size` rollouts have a connection at a time."""
        if not server or (isinstance(server, str) and "://" not in server):
            raise ConfigError(f"MCP server: {server!r} is neither an address nor the words of a command")
        self._server = server
        self._environment = dict(environment or {})
        self._headers = dict(headers or {})
        self._is_shared = is_shared
        self._time_limit = time_limit
        self._pool: Pool[_Connection] = Pool(
            self._connect, size=1 if is_shared else size, close=_Connection.close
        )
        self._shared: Lease[_Connection] | None = None
        self._connecting = asyncio.Lock()

    async def tools(self, only: Sequence[str] | None = None) -> list[Tool]:
        """Its tools; with `only`, those of these names."""
        async with ToolContext("tools") as context:
            connection = await self._connection(context)
            found: dict[str, Tool] = {}
            cursor: str | None = None
            while True:
                page = await connection.client.list_tools(cursor=cursor)
                for each in page.tools:
                    spec = ToolSpec(each.name, each.description or "", dict(each.input_schema))
                    found[each.name] = self._tool(spec)
                if (cursor := page.next_cursor) is None:
                    break
        if missing := set(only or ()) - set(found):
            raise ConfigError(f"MCP server {self._name}: has no {sorted(missing)}; it has {', '.join(found)}")
        return [tool for name, tool in found.items() if only is None or name in only]

    async def close(self) -> None:
        if self._shared is not None:
            self._shared.release()
        await self._pool.close()

    @property
    def _name(self) -> str:
        return self._server if isinstance(self._server, str) else self._server[0]

    def _tool(self, spec: ToolSpec) -> Tool:
        async def run(arguments: Mapping[str, Any], context: ToolContext) -> Any:
            connection = await self._connection(context)
            try:
                answer = await connection.call(spec.name, dict(arguments))
            except ToolFailure:
                self._forget(context)
                raise
            if answer.is_error:
                raise ToolError(_text(answer))
            return _text(answer)

        def read(text: str) -> dict[str, Any]:
            return _read(spec, text)

        return Tool(spec, read, run, time_limit=self._time_limit, stateful=not self._is_shared)

    async def _connection(self, context: ToolContext) -> "_Connection":
        if not self._is_shared:
            return await context.lease(self._pool)
        async with self._connecting:
            if self._shared is None or self._shared.is_over:
                self._shared = await self._pool.acquire()
            return self._shared.resource

    def _forget(self, context: ToolContext) -> None:
        if not self._is_shared:
            context.give_back(self._pool)
        elif self._shared is not None:
            self._shared.release()

    async def _connect(self, key: Key) -> "_Connection":
        connection = _Connection(self._name)
        await connection.open(self._server, self._environment, self._headers)
        return connection


class _Connection:
    """Open from `open` to `close`; the task in between owns it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stop = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self.client: Client

    async def open(
        self, server: str | Sequence[str], environment: dict[str, str], headers: dict[str, str]
    ) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(server, environment, headers, ready))
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await ready
        except BaseException as error:
            self._keeper.cancel()
            if isinstance(error, Exception):
                raise ToolFailure(f"MCP server {self._name}: {_line(error)}") from error
            raise

    async def call(self, name: str, arguments: dict[str, Any]) -> "CallToolResult":
        from mcp import MCPError

        asked = asyncio.ensure_future(self.client.call_tool(name, arguments))
        assert self._keeper is not None
        try:
            await asyncio.wait((asked, self._keeper), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise ToolFailure(f"MCP server {self._name}: the connection was lost")
            return asked.result()
        except MCPError as error:
            if error.code == _CONNECTION_CLOSED:
                raise ToolFailure(f"MCP server {self._name}: {_line(error)}") from error
            raise ToolError(f"{name}: {_line(error)}") from error
        except (OSError, EOFError) as error:
            raise ToolFailure(f"MCP server {self._name}: {_line(error)}") from error
        finally:
            asked.cancel()

    async def close(self) -> None:
        self._stop.set()
        if self._keeper is not None:
            await asyncio.wait((self._keeper,))

    async def _keep(
        self,
        server: str | Sequence[str],
        environment: dict[str, str],
        headers: dict[str, str],
        ready: "asyncio.Future[None]",
    ) -> None:
        from mcp import Client

        try:
            async with AsyncExitStack() as stack:
                target = await _target(stack, server, environment, headers)
                self.client = await stack.enter_async_context(Client(target))
                ready.set_result(None)
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001 - told to whoever waits for the connection, or uses it
            if not ready.done():
                ready.set_exception(error)


async def _target(
    stack: AsyncExitStack, server: str | Sequence[str], environment: dict[str, str], headers: dict[str, str]
) -> Any:
    """What the package's client connects to."""
    if not isinstance(server, str):
        from mcp.client.stdio import StdioServerParameters, stdio_client

        command = StdioServerParameters(command=server[0], args=list(server[1:]), env=environment)
        return stdio_client(command)
    if not headers:
        return server
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers))
    return streamable_http_client(server, http_client=http)


def _read(spec: ToolSpec, text: str) -> dict[str, Any]:
    """The server checks the arguments by its schema; here only what can be said without it."""
    try:
        arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BadArguments(f"not a JSON object: {error}") from None
    missing = [name for name in spec.parameters.get("required", ()) if name not in arguments]
    if missing:
        raise BadArguments(f"missing: {', '.join(missing)}")
    return arguments


def _text(answer: "CallToolResult") -> str:
    """Texts as they are; of anything else its kind."""
    parts = [each.text if each.type == "text" else f"[{each.type}]" for each in answer.content]
    if not parts and answer.structured_content is not None:
        parts = [msgspec.json.encode(answer.structured_content).decode()]
    return "\n".join(parts)


def _line(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split()) or type(error).__name__
