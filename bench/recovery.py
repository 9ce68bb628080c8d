"""How long episodes stand still when their worker dies, and what of them is paid for twice.

    python bench/recovery.py

A worker process plays 256 episodes against an engine over HTTP, with a SQLite store; a second one stands by. The
first is killed (SIGKILL), or told to stop (SIGTERM, nothing to finish). Measured until the second one has claimed
every episode that was in flight, and until each of them has asked the engine for its next turn. After a kill that
includes the lease: until it ends, nobody can know that the worker is dead. Then everything is played to its end, and
the requests that the engine got are compared with the turns that were recorded.
"""

import asyncio
import json
import os
import signal
import sys
import time
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich import box
from rich.table import Table

from results_file import write_results
from rollwright.agents import Session
from rollwright.cli.console import console
from rollwright.cli.event_loop import run_async
from rollwright.config import build
from rollwright.run.worker_settings import CONFIG_KEY
from rollwright.simulation.server_process import RunningServer, simulated_server
from rollwright.store.api import Store
from rollwright.store.http.server import StoreServer
from rollwright.store.opening import open_store
from rollwright.store.records import EnqueueRequest, EventKind, RolloutConfig, RolloutStatus
from rollwright.trajectory import Message, Trajectory

EPISODES = 256
LATENCY = 1.5
"""Seconds of a generation: the engine is never what is waited for, and 256 episodes ask 170 times a second."""
TURNS = 12
"""Of each episode."""
TURNS_BEFORE = 3
"""Turns for each episode, on average, before its worker goes."""
PATIENCE = 120.0
"""Seconds after which the benchmark gives up."""


async def agent(task: object, session: Session) -> float:
    """Every episode has the same number of turns, so all of them are in flight when the worker goes."""
    turn = None
    for _ in range(TURNS):
        turn = await session.generate([Message("user", "Go on.")], continues=turn)
    return 1.0


@dataclass(frozen=True)
class Case:
    how: signal.Signals
    lease: float
    heartbeat: float

    @property
    def name(self) -> str:
        return f"{self.how.name}, lease {self.lease:g} s"


CASES = (
    Case(signal.SIGKILL, lease=5.0, heartbeat=1.0),
    Case(signal.SIGKILL, lease=30.0, heartbeat=5.0),
    Case(signal.SIGTERM, lease=30.0, heartbeat=5.0),
)
"""A short lease; the default one; and no lease to wait for."""


@dataclass(frozen=True)
class Figures:
    in_flight: int
    """Episodes that the first worker held when it went."""
    claimed_seconds: float
    """Until the second worker had claimed them all."""
    asking_seconds: float
    """Until each had asked the engine for the turn behind its last recorded one."""
    lease_left: float
    """Seconds until the last lease ended, counted from when the worker went; 0 where none was waited for."""
    recorded_turns: int
    """Turns that were durable when the worker had gone."""
    lost_generations: int
    """Requests to the engine that left no turn: at most the one in flight of each episode."""
    recorded_generated_again: int | None
    """Recorded turns that the engine was asked for once more. `None`: the second worker went on before the first had
    ended, so there was no moment to count at; the column before bounds it."""


async def measure(case: Case) -> Figures:
    with TemporaryDirectory() as folder:
        path = Path(folder)
        store = await open_store(str(path / "store.db"))
        try:
            async with (
                simulated_server(latency=LATENCY, latency_sigma=0.3) as engine,
                StoreServer(store, path=path / "store.sock") as server,
            ):
                ids = await enqueue(store, engine, case)
                async with worker(server.url, "first", case) as first:
                    return await _lose(store, engine, server.url, ids, first, case)
        finally:
            await store.close()


async def _lose(
    store: Store, engine: RunningServer, url: str, ids: list[str], first: Process, case: Case
) -> Figures:
    await until(lambda: _all_begun(store), "all episodes in flight")
    async with worker(url, "second", case):
        await until(lambda: _known(store, "second"), "the second worker")
        await until(lambda: _asked(engine, TURNS_BEFORE * EPISODES), "some turns")
        held = set(await _open(store, ids))
        cursor, asked = await _last_event(store), await _requests(engine)
        gone = time.monotonic()
        os.kill(first.pid, case.how)
        claiming = asyncio.create_task(_claimed_again(store, cursor, held, gone))
        asking = asyncio.create_task(_asked_again(engine, asked + len(held), gone))
        await first.wait()
        before = await _requests(engine)
        recorded = await _recorded_turns(store, ids)
        (claimed_seconds, lease_left), asking_seconds = await claiming, await asking
        await store.wait_for_rollouts(ids, timeout=PATIENCE)
        turns = await _recorded_turns(store, ids)
        requests = await _requests(engine)
    return Figures(
        in_flight=len(held),
        claimed_seconds=round(claimed_seconds, 2),
        asking_seconds=round(max(asking_seconds, claimed_seconds), 2),
        lease_left=round(lease_left, 2),
        recorded_turns=recorded,
        lost_generations=requests - turns,
        recorded_generated_again=(requests - before) - (turns - recorded) if lease_left else None,
    )


async def enqueue(store: Store, engine: RunningServer, case: Case) -> list[str]:
    config = build(
        {
            "name": "recovery",
            "policy": {"kind": "openai", "base_url": engine.base_url, "model": "simulated"},
            "limits": {"lease_seconds": case.lease, "heartbeat_interval": case.heartbeat},
            "val_env_manager": {"num_env_groups": 1, "tags": ["FrozenLake"]},  # not played: the agent is
        }
    )
    await store.add_resources({CONFIG_KEY: config.model_dump(mode="json")}, resources_id=config.name)
    rules = RolloutConfig(unresponsive_seconds=case.lease)
    request = EnqueueRequest(input={}, resources_id=config.name, config=rules)
    return [each.rollout_id for each in await store.enqueue_many_rollouts([request] * EPISODES)]


@asynccontextmanager
async def worker(url: str, name: str, case: Case) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollwright", "worker", "--store", url, "--id", name, "--envs", str(EPISODES),
        "--heartbeat-interval", str(case.heartbeat), "--drain-seconds", "0", "--no-find-capacity", "--quiet",
        "--tied",
        "--agent", "recovery:agent", env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)}, stdin=PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(PATIENCE):
            while not await condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise SystemExit(f"waited in vain for {what}") from None


async def _all_begun(store: Store) -> bool:
    counts = await store.statistics()
    return counts[RolloutStatus.QUEUING] + counts[RolloutStatus.PREPARING] == 0


async def _known(store: Store, name: str) -> bool:
    return await store.get_worker_by_id(name) is not None


async def _requests(engine: RunningServer) -> int:
    def ask() -> int:
        with urllib.request.urlopen(engine.stats_url, timeout=PATIENCE) as answer:
            return int(json.load(answer)["requests"])

    return await asyncio.to_thread(ask)


async def _asked(engine: RunningServer, count: int) -> bool:
    return await _requests(engine) >= count


async def _open(store: Store, ids: list[str]) -> list[str]:
    page = await store.query_rollouts(rollout_ids=ids)
    return [each.rollout_id for each in page if each.status is not RolloutStatus.SUCCEEDED]


async def _recorded_turns(store: Store, ids: list[str]) -> int:
    journals = [await store.read_journal(each) for each in ids]
    kept = await store.get_trajectories(ids)
    committed = sum(len(Trajectory.from_bytes(each).turns) for each in kept.values())
    return sum(map(len, journals)) + committed


async def _last_event(store: Store) -> int:
    cursor = 0
    while events := await store.read_events(cursor):
        cursor = events[-1].sequence
    return cursor


async def _claimed_again(store: Store, cursor: int, held: set[str], gone: float) -> tuple[float, float]:
    """Seconds until the second worker had them all, and until the last of the first one's leases had ended."""
    missing, lease_left = set(held), 0.0
    async with asyncio.timeout(PATIENCE):
        while missing:
            for event in await store.read_events(cursor):
                cursor = event.sequence
                if event.kind is EventKind.CLAIMED and event.worker_id == "second":
                    missing.discard(event.rollout_id)
                elif event.kind is EventKind.ENDED and event.status == "unresponsive":
                    lease_left = time.monotonic() - gone
            await asyncio.sleep(0.01)
    return time.monotonic() - gone, lease_left


async def _asked_again(engine: RunningServer, count: int, gone: float) -> float:
    await until(lambda: _asked(engine, count), "the next turns")
    return time.monotonic() - gone


def main() -> None:
    screen = console()
    table = Table(title="a worker goes", title_justify="left", box=box.SIMPLE_HEAD)
    for column in (
        "how",
        "in flight",
        "leases ended",
        "all claimed",
        "all asking",
        "turns kept",
        "lost",
        "kept, paid again",
    ):
        table.add_column(column, justify="left" if column == "how" else "right")
    rows = []
    for case in CASES:
        figures = run_async(measure(case))
        rows.append({"how": case.name, "lease": case.lease, **asdict(figures)})
        table.add_row(
            case.name,
            str(figures.in_flight),
            f"{figures.lease_left:.2f} s" if figures.lease_left else "–",
            f"{figures.claimed_seconds:.2f} s",
            f"{figures.asking_seconds:.2f} s",
            f"{figures.recorded_turns:,}",
            str(figures.lost_generations),
            "–" if figures.recorded_generated_again is None else str(figures.recorded_generated_again),
        )
    screen.print(table)
    write_results("recovery", {"episodes": EPISODES, "latency": LATENCY, "cases": rows})
    if any(row["recorded_generated_again"] or row["lost_generations"] > row["in_flight"] for row in rows):
        sys.exit("a recorded turn was generated again")


if __name__ == "__main__":
    main()
