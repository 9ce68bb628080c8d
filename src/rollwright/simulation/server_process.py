"""Runs the simulated server as a child process inside an `async with` block.

Always true: the process ends with the block. It also ends when its parent dies, because it watches a pipe from the parent.
"""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any

from rollwright.engines.base import EngineError
from rollwright.simulation.server import ServerOptions

_START_SECONDS = 30.0
"""Starting takes well under a second; a machine that swaps needs more."""

_STOP_SECONDS = 5.0
"""The server has no state worth a longer wait."""


@dataclass(frozen=True)
class RunningServer:
    """The address of a running simulated server."""

    port: int
    pid: int

    @property
    def base_url(self) -> str:
        """The `base_url` of an `OpenAIPolicy`."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def stats_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/stats"


@asynccontextmanager
async def simulated_server(**options: Any) -> AsyncIterator[RunningServer]:
    """Run a server with these `ServerOptions` inside the `async with` block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rollwright.simulation.server",
        "--until-stdin-closes",
        *_arguments(ServerOptions(**options)),
        stdin=PIPE,
        stdout=PIPE,
    )
    try:
        yield RunningServer(await _port(process), process.pid)
    finally:
        await _stop(process)


def _arguments(options: ServerOptions) -> list[str]:
    arguments = []
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, bool):
            arguments += [f"--{field.name.replace('_', '-')}"] * value
            continue
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        arguments.append(f"--{field.name.replace('_', '-')}={text}")
    return arguments


async def _port(process: Process) -> int:
    assert process.stdout is not None
    async with asyncio.timeout(_START_SECONDS):
        line = await process.stdout.readline()
    if not line.strip().isdigit():
        raise EngineError("the simulated server did not start; its stderr says why")
    return int(line)


async def _stop(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
