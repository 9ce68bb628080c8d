"""What a vLLM server says of itself and what it spends, and its prefix cache emptied."""

import os
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from vllm_server import VllmServer


async def totals(server: VllmServer, names: Sequence[str]) -> list[float]:
    """Counters of the server so far, each over all its labels; 0 for one that it does not have."""
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return [
        sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))
        for name in names
    ]


async def empty_cache(server: VllmServer) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/reset_prefix_cache") as response,
    ):
        response.raise_for_status()


WORKER = "VLLM::Worker"
"""The process that runs the model. What the others take, which wait for it, depends more on how long they wait, and so on
what else the machine does."""


def cpu_seconds(server: VllmServer) -> float:
    """Processor time of the process that runs the model, since it began."""
    assert server.process is not None
    group = str(server.process.pid)
    ticks, workers = 0, 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, behind = file.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended since it was listed
            continue
        fields = behind.split()
        if fields[2] == group and name.startswith(WORKER):
            workers += 1
            ticks += int(fields[11]) + int(fields[12])
    if workers != 1:
        raise SystemExit(f"the server has {workers} processes called {WORKER}, not one")
    return ticks / os.sysconf("SC_CLK_TCK")
