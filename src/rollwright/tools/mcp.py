"""Tools of an MCP server, which is a command with stdio transport or an HTTP address.

A dedicated task owns each connection, because the MCP client must be closed by the task that opened it. Rollouts share
one connection, or each leases its own and so has a server process or HTTP session to itself. A tool's own error is an
observation; a lost connection fails the attempt, and the next call reconnects.
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
"""Timeout for starting a server and the MCP handshake."""

_CONNECTION_CLOSED = -32000
"""Error code of the MCP package for a request whose connection was closed."""


class McpServer:
    """One MCP server, given by command or address."""

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
        """`server` is an address (`http://...`) or the words of a command, whose process gets only `environment` and the
        MCP package's few default variables. Without `is_shared`, at most `size` rollouts hold a connection at a time."""
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
        """Lists the server's tools; with `only`, the tools of these names."""
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
        """Closes all connections."""
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
                result = await connection.call(spec.name, dict(arguments))
            except ToolFailure:
                self._release(context)
                raise
            if result.is_error:
                raise ToolError(_text(result))
            return _text(result)

        def read(text: str) -> dict[str, Any]:
            return _parse_arguments(spec, text)

        return Tool(spec, read, run, time_limit=self._time_limit, stateful=not self._is_shared)

    async def _connection(self, context: ToolContext) -> "_Connection":
        if not self._is_shared:
            return await context.lease(self._pool)
        async with self._connecting:
            if self._shared is None or self._shared.is_over:
                self._shared = await self._pool.acquire()
            return self._shared.resource

    def _release(self, context: ToolContext) -> None:
        if not self._is_shared:
            context.release(self._pool)
        elif self._shared is not None:
            self._shared.release()

    async def _connect(self, key: Key) -> "_Connection":
        connection = _Connection(self._name)
        await connection.open(self._server, self._environment, self._headers)
        return connection


class _Connection:
    """One MCP connection, owned by a task that runs from `open` to `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stop = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None
        self.client: Client

    async def open(
        self, server: str | Sequence[str], environment: dict[str, str], headers: dict[str, str]
    ) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(server, environment, headers, ready))
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await ready
        except BaseException as error:
            self._owner.cancel()
            if isinstance(error, Exception):
                raise ToolFailure(f"MCP server {self._name}: {_line(error)}") from error
            raise

    async def call(self, name: str, arguments: dict[str, Any]) -> "CallToolResult":
        from mcp import MCPError

        request = asyncio.ensure_future(self.client.call_tool(name, arguments))
        assert self._owner is not None
        try:
            # The owner ends when the connection breaks, and the request might then never complete.
            await asyncio.wait((request, self._owner), return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise ToolFailure(f"MCP server {self._name}: the connection was lost")
            return request.result()
        except MCPError as error:
            if error.code == _CONNECTION_CLOSED:
                raise ToolFailure(f"MCP server {self._name}: {_line(error)}") from error
            raise ToolError(f"{name}: {_line(error)}") from error
        except (OSError, EOFError) as error:
            raise ToolFailure(f"MCP server {self._name}: {_line(error)}") from error
        finally:
            request.cancel()

    async def close(self) -> None:
        self._stop.set()
        if self._owner is not None:
            await asyncio.wait((self._owner,))

    async def _own(
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
        except Exception as error:  # noqa: BLE001 - raised in `open`, or seen by `call` as a lost connection
            if not ready.done():
                ready.set_exception(error)


async def _target(
    stack: AsyncExitStack, server: str | Sequence[str], environment: dict[str, str], headers: dict[str, str]
) -> Any:
    """Transport for the MCP package's client."""
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


def _parse_arguments(spec: ToolSpec, text: str) -> dict[str, Any]:
    """Parses a call's JSON; the server validates the arguments against its schema."""
    try:
        arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BadArguments(f"not a JSON object: {error}") from None
    missing = [name for name in spec.parameters.get("required", ()) if name not in arguments]
    if missing:
        raise BadArguments(f"missing: {', '.join(missing)}")
    return arguments


def _text(result: "CallToolResult") -> str:
    """Text parts of a result; any other part as its type in brackets."""
    parts = [each.text if each.type == "text" else f"[{each.type}]" for each in result.content]
    if not parts and result.structured_content is not None:
        parts = [msgspec.json.encode(result.structured_content).decode()]
    return "\n".join(parts)


def _line(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split()) or type(error).__name__
