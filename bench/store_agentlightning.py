"""The peer's arm of `bench/store.py`, for the interpreter that has agentlightning.

    .venvs/agentlightning/bin/python bench/store_agentlightning.py memory|http KEPT PLAYED COLLECTOR

Plays the same rollouts as `store_load.py` and prints the same measurements. `http` calls `agl store` in a process of its
own. Background rollouts are enqueued after the rollouts that are played, because the peer's queue has no priorities.
`COLLECTOR` is the file with rollwright's garbage collector settings, applied to this process as to `store_load.py`;
`agl store` runs with its own.
"""

import asyncio
import importlib.util
import json
import socket
import sys
import time
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
from agentlightning.store.client_server import LightningStoreClient
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import EnqueueRolloutRequest

WORKERS = 4
CHUNK = 1000
START_SECONDS = 120.0
"""Time limit for the start of `agl store`, which imports for about ten seconds."""


async def measure(store: Any, kept: int, played: int) -> dict[str, Any]:
    share = played // WORKERS
    for first in range(0, kept, CHUNK):
        count = min(CHUNK, kept - first)
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={"n": n}) for n in range(count)])
        await store.dequeue_many_rollouts(limit=count, worker_id="background")

    async def enqueue(worker: int) -> None:
        for number in range(share):
            await store.enqueue_rollout({"prompt": "a task", "n": number})

    async def play(worker: int) -> None:
        name = f"worker-{worker}"
        for _ in range(share):
            claimed = await store.dequeue_rollout(worker_id=name)
            await store.update_worker(name, {"busy": True})
            await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
            await asyncio.sleep(0)  # else one worker would play them all

    cpu = time.process_time()
    enqueue_seconds = await timed(enqueue)
    for first in range(0, kept, CHUNK):
        count = min(CHUNK, kept - first)
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={"n": n}) for n in range(count)])
    play_seconds = await timed(play)
    return {
        "enqueue_seconds": enqueue_seconds,
        "play_seconds": play_seconds,
        "client_cpu_seconds": time.process_time() - cpu,
        "played": share * WORKERS,
    }


async def timed(phase: Callable[[int], Awaitable[None]]) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(phase(worker) for worker in range(WORKERS)))
    return time.perf_counter() - began


@asynccontextmanager
async def opened(arm: str) -> AsyncIterator[Any]:
    if arm == "memory":
        yield InMemoryLightningStore()
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("agl"), "store", "--host", "127.0.0.1", "--port", str(port)]
    server = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL)
    try:
        await wait_for_answer(port)
        client = LightningStoreClient(f"http://127.0.0.1:{port}")
        yield client
        await client.close()
    finally:
        server.terminate()
        await server.wait()


async def wait_for_answer(port: int) -> None:
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.2)
        else:
            writer.close()
            return
    raise SystemExit(f"agl store has not answered for {START_SECONDS:g} s")


def load_collector(file: str) -> Any:
    """Loads the module from its file: this interpreter does not have rollwright, and the file does not import it."""
    spec = importlib.util.spec_from_file_location("collector", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def main(arm: str, kept: int, played: int, collector_file: str) -> None:
    async with opened(arm) as store:
        with load_collector(collector_file).rare_collections():
            print(json.dumps(await measure(store, kept, played)))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
