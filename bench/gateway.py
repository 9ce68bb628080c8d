"""What recording an agent at the API costs: CPU time of the gateway's process for a call, and latency.

    python bench/gateway.py

Agents of the openai SDK play rollouts of four turns, 64 and 256 at a time, against a simulated engine that answers at once:
through `rollwright gateway` with a store in memory and with one in a SQLite file, through rLLM's gateway and through the
litellm proxy. Opening and ending the rollouts are phases of their own, so their cost is not part of a call's. The arms take
turns, round by round, in the same run. Latency is the median of a call of one agent alone; the call that goes straight to
the engine is the SDK's and the engine's own share of it, and flushes of the disk between those calls are what a durable
turn waits for at least. Prints a table and writes `bench/results/gateway.json`. Takes about
five minutes; environments for the peers are made on the first run.
"""

import asyncio
import os
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from gateway_arms import ARMS, Arm, Place, running
from results_file import write_results
from rollwright.simulation.server_process import simulated_server

TURNS = 4
AGENTS = (64, 256)
ROUNDS = 2
"""Rounds of each arm with each number of agents; every round opens, plays and ends one rollout for each agent."""
FLUSHES = 20
"""Flushes of the disk behind each arm's turn."""
ALONE = 60
"""Rollouts that one agent plays one after the other, for latency."""

CPU_LIMITS = {"gateway, memory": 0.4, "gateway, SQLite": 0.5}
"""CPU milliseconds that the gateway may take for a call."""
LATENCY_LIMITS = {"gateway, SQLite": 3.0}
"""Milliseconds that a call of a lone agent may take."""


@dataclass
class Spent:
    """CPU seconds of a server's process by phase, over all rounds."""

    opening: float = 0.0
    calls: float = 0.0
    ending: float = 0.0
    rollouts: int = 0
    seconds: float = 0.0
    """Wall-clock time of the calls."""


@dataclass
class Figures:
    spent: dict[int, Spent] = field(default_factory=lambda: {agents: Spent() for agents in AGENTS})
    latencies: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        by_agents = {}
        for agents, spent in self.spent.items():
            calls = spent.rollouts * TURNS
            by_agents[str(agents)] = {
                "cpu_ms_per_call": spent.calls / calls * 1e3,
                "cpu_ms_per_open": spent.opening / spent.rollouts * 1e3,
                "cpu_ms_per_end": spent.ending / spent.rollouts * 1e3,
                "calls_per_second": calls / spent.seconds,
            }
        return {"latency_ms": median(self.latencies) * 1e3, "agents": by_agents}


async def converse(client: AsyncOpenAI, latencies: list[float] | None = None) -> None:
    """One agent's rollout."""
    messages: list[Any] = [{"role": "system", "content": "You play a game. " * 20}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"This is turn {turn}. " * 10})
        started = time.perf_counter()
        answer = await client.chat.completions.create(model="simulated", messages=messages)
        if latencies is not None:
            latencies.append(time.perf_counter() - started)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


def sdk(place: Place, http: httpx.AsyncClient) -> AsyncOpenAI:
    """A client of its own for each agent, on connections that all share, so that 256 of them start at once. It repeats
    what fails: rLLM's gateway over SQLite drops connections with 256 agents."""
    return AsyncOpenAI(base_url=place.url, api_key=place.key, http_client=http, max_retries=8)


async def play_round(arm: Arm, agents: int, spent: Spent, http: httpx.AsyncClient) -> None:
    readings = [arm.cpu_seconds()]
    places = await asyncio.gather(*(arm.open() for _ in range(agents)))
    readings.append(arm.cpu_seconds())
    started = time.perf_counter()
    await asyncio.gather(*(converse(sdk(place, http)) for place in places))
    spent.seconds += time.perf_counter() - started
    readings.append(arm.cpu_seconds())
    await asyncio.gather(*(arm.end(place, TURNS) for place in places))
    readings.append(arm.cpu_seconds())
    spent.opening += readings[1] - readings[0]
    spent.calls += readings[2] - readings[1]
    spent.ending += readings[3] - readings[2]
    spent.rollouts += agents


def flush_once(file: int) -> float:
    """Seconds that the disk takes to make one page durable."""
    os.write(file, b"x" * 4096)
    started = time.perf_counter()
    os.fdatasync(file)
    return time.perf_counter() - started


async def play_alone(arm: Arm, figures: Figures, http: httpx.AsyncClient, rollouts: int) -> None:
    for _ in range(rollouts):
        place = await arm.open()
        await converse(sdk(place, http), figures.latencies)
        await arm.end(place, TURNS)


async def all_figures(console: Console) -> tuple[dict[str, Figures], list[float]]:
    """The figures of each arm, and the seconds of flushes in between."""
    flushes: list[float] = []
    found = {name: Figures() for name in ("direct", *ARMS)}
    # uvicorn closes connections that were idle for 5 s, and a request that meets the closing fails.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=512, keepalive_expiry=2.0)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(simulated_server())
        http = await stack.enter_async_context(httpx.AsyncClient(limits=limits, timeout=120))
        folder = Path(stack.enter_context(TemporaryDirectory()))
        page = os.open(folder / "flushed", os.O_WRONLY | os.O_CREAT)
        stack.callback(os.close, page)
        arms = [Arm("direct", engine.base_url, None, http)]
        for name in ARMS:
            with console.status(f"starting: {name}"):
                arms.append(await stack.enter_async_context(running(name, folder, engine.base_url, http)))
        for arm in arms:  # code is warm, connections are made
            await play_round(arm, min(AGENTS), Spent(), http)
            await play_alone(arm, Figures(), http, 5)
        for part in range(ROUNDS):
            for arm in arms:
                with console.status(f"round {part + 1} of {ROUNDS}: {arm.name}"):
                    await play_alone(arm, found[arm.name], http, ALONE // ROUNDS)
                    flushes += [flush_once(page) for _ in range(FLUSHES)]
                    for agents in AGENTS:
                        await play_round(arm, agents, found[arm.name].spent[agents], http)
    return found, flushes


def show(console: Console, arms: dict[str, dict[str, Any]], flush_ms: float) -> None:
    table = Table("arm", "median ms, alone", *(f"CPU ms a call, {agents} agents" for agents in AGENTS))
    for title in ("open", "end", "calls/s", "limit"):
        table.add_column(title)
    for name, row in arms.items():
        most = row["agents"][str(max(AGENTS))]
        calls = [f"{row['agents'][str(agents)]['cpu_ms_per_call']:.2f}" for agents in AGENTS]
        rest = (
            f"{most['cpu_ms_per_open']:.2f}",
            f"{most['cpu_ms_per_end']:.2f}",
            f"{most['calls_per_second']:,.0f}",
        )
        table.add_row(name, f"{row['latency_ms']:.2f}", *calls, *rest, f"{CPU_LIMITS.get(name, '–')}")
    console.print(table)
    console.print(f"one flush of this disk in between: median {flush_ms:.2f} ms")


def main() -> None:
    console = Console()
    load = os.getloadavg()[0]
    figures, flushes = asyncio.run(all_figures(console))
    arms = {name: each.summary() for name, each in figures.items()}
    flush_ms = median(flushes) * 1e3
    show(console, arms, flush_ms)
    content = {
        "load_before": load,
        "rounds": ROUNDS,
        "turns": TURNS,
        "flush_ms": flush_ms,
        "cpu_limits_ms": CPU_LIMITS,
        "latency_limits_ms": LATENCY_LIMITS,
        "arms": arms,
    }
    console.print(f"written to {write_results('gateway', content)}")


if __name__ == "__main__":
    main()
