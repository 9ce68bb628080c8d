"""A small MCP server for the tests, with stdio transport, or with HTTP if a port is given."""

import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("little")
count = 0


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def count_up() -> str:
    """Counts its own calls."""
    global count
    count += 1
    return str(count)


@server.tool()
def fail(reason: str) -> str:
    """Fails."""
    raise ToolError(reason)


@server.tool()
def environment() -> list[str]:
    """Names of its environment variables."""
    return sorted(os.environ)


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
