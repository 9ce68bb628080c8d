"""Tools of a real MCP server in another process behave like any other tools."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollwright.errors import ConfigError
from rollwright.tools import Problem, Toolbox, ToolContext, ToolFailure
from rollwright.tools.mcp import McpServer
from rollwright.trajectory import ToolCall

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = [sys.executable, str(SERVER)]


@pytest.fixture
async def over_stdio() -> AsyncIterator[McpServer]:
    server = McpServer(COMMAND)
    yield server
    await server.close()


async def call(box: Toolbox, name: str, context: ToolContext, **arguments: Any) -> Any:
    return (await box.run([ToolCall("c", name, json.dumps(arguments))], context))[0]


async def test_a_servers_tools_are_found_called_and_checked(over_stdio: McpServer) -> None:
    box = Toolbox(await over_stdio.tools())
    assert [spec.name for spec in box.specs] == ["add", "count_up", "fail", "environment", "die"]
    assert box["add"].spec.description == "Adds two numbers."
    assert box["add"].spec.parameters["required"] == ["a"]
    async with ToolContext("r") as context:
        assert (await call(box, "add", context, a=2, b=3)).content == "5"
        missing = await call(box, "add", context, b=3)
        assert (missing.problem, missing.content) == (
            Problem.BAD_ARGUMENTS,
            "add: wrong arguments: missing: a. It takes: a (integer), b (integer, optional).",
        )
        wrong = await call(box, "add", context, a="many")
        assert wrong.problem is Problem.EXCEPTION
        assert "integer" in wrong.content
        failed = await call(box, "fail", context, reason="no luck")
        assert (failed.problem, "no luck" in failed.content) == (Problem.EXCEPTION, True)


async def test_a_server_gets_none_of_this_processs_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWRIGHT_TEST_SECRET", "hunter2")
    server = McpServer(COMMAND, environment={"GIVEN": "1"})
    box = Toolbox(await server.tools(only=["environment"]))
    async with ToolContext("r") as context:
        names = (await call(box, "environment", context)).content
    await server.close()
    assert "GIVEN" in names
    assert "ROLLWRIGHT_TEST_SECRET" not in names


async def test_rollouts_share_a_connection_or_have_one_each() -> None:
    for is_shared, expected in ((True, ["1", "2", "3"]), (False, ["1", "2", "1"])):
        server = McpServer(COMMAND, is_shared=is_shared)
        box = Toolbox(await server.tools())
        assert box["count_up"].stateful is not is_shared
        counted = []
        for rollout, calls in (("first", 2), ("second", 1)):
            async with ToolContext(rollout) as context:
                counted += [(await call(box, "count_up", context)).content for _ in range(calls)]
        await server.close()
        assert counted == expected


async def test_a_server_that_dies_ends_the_attempt_and_the_next_call_finds_a_new_one(
    over_stdio: McpServer,
) -> None:
    box = Toolbox(await over_stdio.tools())
    async with ToolContext("r") as context:
        with pytest.raises(ToolFailure, match="MCP server"):
            await asyncio.wait_for(call(box, "die", context), 30)
        assert (await call(box, "add", context, a=1)).content == "2"


async def test_a_server_over_http() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *COMMAND, str(port), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await listening(port)
        for headers in (None, {"Authorization": "Bearer x"}):
            server = McpServer(f"http://127.0.0.1:{port}/mcp", headers=headers)
            box = Toolbox(await server.tools(only=["add"]))
            async with ToolContext("r") as context:
                several = await box.run(
                    [ToolCall(f"c{n}", "add", f'{{"a": {n}}}') for n in range(4)], context
                )
            assert [each.content for each in several] == ["1", "2", "3", "4"]
            await server.close()
    finally:
        process.kill()
        await process.wait()


async def listening(port: int) -> None:
    for _ in range(400):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
    raise AssertionError("the server did not start")


async def test_what_is_no_server_is_told_in_one_line(over_stdio: McpServer) -> None:
    with pytest.raises(ConfigError, match="neither an address nor the words of a command"):
        McpServer("little")
    with pytest.raises(ToolFailure, match="MCP server /nowhere/at/all"):
        await McpServer(["/nowhere/at/all"]).tools()
    with pytest.raises(ConfigError, match=r"has no \['multiply'\]; it has add, count_up"):
        await over_stdio.tools(only=["multiply"])
