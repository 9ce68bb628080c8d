"""What the gateway adds to a call: latency, and CPU time of its process.

    python bench/gateway.py

Agents without any SDK play rollouts of four turns against a simulated engine that answers at once, each in a process
of its own: once directly, once through `rollwright gateway` with a store in memory and with one in a SQLite file. CPU
time that is added is that of the gateway's process: it serves the agent, asks the engine, records and journals. CPU
time of all is that and the agents' own. Opening and ending a rollout are shared out among its calls. Latency is the
median of a call when one agent is alone. Prints a table and writes `bench/results/gateway.json`. Takes about a minute.

The peers' figures are not measured here. They were taken on a machine of the same kind (2 cores) with runs of the same
shape (rollouts of four turns, 64 at a time, an engine that answers at once), and are CPU time for each turn of all that
runs on the near side of the engine, agents included; so they stand beside our CPU time of all, not beside what is
added. They record no token ids there, and neither does the engine that is asked here.
"""

import asyncio
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console
from rich.table import Table

from results_file import write_results
from rollwright.simulation.server_process import simulated_server

TURNS = 4
AGENTS = 64
"""At the same time, for CPU time."""
ROLLOUTS = 1000
ALONE = 100
"""Rollouts that one agent plays one after the other, for latency."""
WANTED_MS = 1.0
"""CPU time that the gateway may add to a call, in milliseconds."""

PEERS = [
    ("verifiers 0.4.0, SingleAgentEnv, in-process harness", 6.7),
    ("rLLM AgentFlowEngine and gateway, in memory", 9.0),
    ("rLLM AgentFlowEngine and gateway, SQLite", 11.8),
]
"""CPU milliseconds of all for each turn."""

ADMIN = "rw-admin-bench"
COMMAND = "import typer; from rollwright.cli.gateway import gateway; typer.run(gateway)"
CONFIG = """
policy: {{kind: openai, base_url: "{url}", model: simulated}}
val_env_manager: {{num_env_groups: 1, tags: [FrozenLake]}}
"""
TICKS = os.sysconf("SC_CLK_TCK")


class Place(NamedTuple):
    """Where an agent's calls go."""

    url: str
    key: str


class Arm:
    """Plays rollouts; a subclass says where their calls go."""

    def __init__(self, client: aiohttp.ClientSession, engine_url: str) -> None:
        self.client = client
        self.engine_url = engine_url
        self.latencies: list[float] = []

    async def opened(self) -> Place:
        return Place(self.engine_url, "none")

    async def ended(self, place: Place) -> None:
        """Nothing to say to an engine."""

    async def rollout(self) -> None:
        place = await self.opened()
        messages: list[Any] = [{"role": "system", "content": "You play a game. " * 20}]
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"This is turn {turn}. " * 10})
            started = time.perf_counter()
            answer = await self.post(
                f"{place.url}/chat/completions", place.key, {"model": "simulated", "messages": messages}
            )
            self.latencies.append(time.perf_counter() - started)
            messages.append(answer["choices"][0]["message"])
        await self.ended(place)

    async def post(self, url: str, key: str, body: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        async with self.client.post(url, json=body, headers=headers) as answer:
            answer.raise_for_status()
            return await answer.json()


class ThroughGateway(Arm):
    def __init__(self, client: aiohttp.ClientSession, gateway_url: str) -> None:
        super().__init__(client, "")
        self.gateway_url = gateway_url

    async def opened(self) -> Place:
        made = await self.post(f"{self.gateway_url}/rollouts", ADMIN, {"input": None})
        return Place(made["base_url"], made["api_key"])

    async def ended(self, place: Place) -> None:
        ended = await self.post(f"{place.url.removesuffix('/v1')}/end", place.key, {"reward": 1.0})
        assert ended["turns"] == TURNS


@asynccontextmanager
async def gateway_process(folder: Path, store: str, engine_url: str) -> AsyncIterator[tuple[int, str]]:
    """The gateway's process id and its address."""
    (folder / "config.yaml").write_text(CONFIG.format(url=engine_url), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, str(folder / "config.yaml"), "--store", store, "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "ROLLWRIGHT_GATEWAY_KEY": ADMIN},
    )
    assert process.stdout is not None
    try:
        said = (await process.stdout.readline()).decode()
        found = re.search(r"http://\S+:\d+", said)
        if found is None:
            raise RuntimeError(f"the gateway did not start: {said}")
        yield process.pid, found[0]
    finally:
        process.terminate()
        await process.communicate()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def play(arm: Arm, rollouts: int, agents: int) -> float:
    """Seconds that they took."""
    left = iter(range(rollouts))

    async def agent() -> None:
        for _ in left:
            await arm.rollout()

    started = time.perf_counter()
    await asyncio.gather(*(agent() for _ in range(agents)))
    return time.perf_counter() - started


async def measure(arm: Arm, pid: int | None) -> dict[str, float]:
    await play(arm, AGENTS, AGENTS)  # connections are made, code is warm
    arm.latencies.clear()
    await play(arm, ALONE, 1)
    alone = median(arm.latencies)
    before, own = cpu_seconds(pid) if pid else 0.0, time.process_time()
    seconds = await play(arm, ROLLOUTS, AGENTS)
    calls = ROLLOUTS * TURNS
    added = (cpu_seconds(pid) - before) / calls * 1e3 if pid else 0.0
    return {
        "latency_ms": alone * 1e3,
        "calls_per_second": calls / seconds,
        "added_cpu_ms": added,
        "cpu_of_all_ms": added + (time.process_time() - own) / calls * 1e3,
    }


async def all_figures(console: Console) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        simulated_server() as engine,
        aiohttp.ClientSession(connector=connector) as client,
    ):
        with console.status("directly"):
            found["direct"] = await measure(Arm(client, engine.base_url), None)
        for name in ("memory", "sqlite"):
            with TemporaryDirectory() as folder, console.status(f"gateway, store: {name}"):
                store = "memory" if name == "memory" else str(Path(folder) / "store.db")
                async with gateway_process(Path(folder), store, engine.base_url) as (pid, url):
                    found[f"gateway, {name}"] = await measure(ThroughGateway(client, url), pid)
    return found


def show(console: Console, figures: dict[str, dict[str, float]]) -> None:
    table = Table(
        "calls", "median ms, alone", "calls/s, 64 agents", "CPU ms of all", "added CPU ms", "limit", "× limit"
    )
    for name, row in figures.items():
        added = row["added_cpu_ms"]
        limit = (f"{added:.2f}", f"{WANTED_MS:g}", f"{added / WANTED_MS:.2f}") if added else ("–", "–", "–")
        speed = f"{row['latency_ms']:.2f}", f"{row['calls_per_second']:,.0f}", f"{row['cpu_of_all_ms']:.2f}"
        table.add_row(name, *speed, *limit)
    for name, cpu in PEERS:
        table.add_row(name, "–", "–", f"{cpu:.1f}", "–", "–", "–")
    console.print(table)


def main() -> None:
    console = Console()
    load = os.getloadavg()[0]
    figures = asyncio.run(all_figures(console))
    show(console, figures)
    direct = figures["direct"]["latency_ms"]
    content = {
        "load_before": load,
        "wanted_cpu_ms": WANTED_MS,
        "arms": figures,
        "added_latency_ms": {
            name: row["latency_ms"] - direct for name, row in figures.items() if name != "direct"
        },
        "peers_cpu_of_all_ms": dict(PEERS),
    }
    console.print(f"written to {write_results('gateway', content)}")


if __name__ == "__main__":
    main()
