"""Twenty rollouts, four workers: who takes what.

    python examples/share_rollouts.py                 workers as coroutines, the store in memory
    python examples/share_rollouts.py --processes     workers as processes, the store in a SQLite file

The store gives each rollout to one worker only, so the workers need not know of each other.
"""

import asyncio
from collections import Counter
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from rollwright import MemoryStore, Store, open_store


async def create_rollouts(store: Store, count: int) -> None:
    for number in range(1, count + 1):
        await store.enqueue_rollout({"prompt": f"Task {number}", "task_id": number})


async def worker_task(worker_id: str, store: Store, max_rollouts: int, poll_interval: float) -> None:
    """Takes rollouts until there are none for `poll_interval` seconds, or it has had `max_rollouts`."""
    for _ in range(max_rollouts):
        rollout = await store.dequeue_rollout(worker_id=worker_id, timeout=poll_interval)
        if rollout is None:
            break
        line = f"{worker_id} took {rollout.rollout_id} {rollout.input}\n"
        print(line, end="", flush=True)  # with its end in one piece: other processes write to the same screen
        await asyncio.sleep(0.05)  # the work
        await store.update_attempt(
            rollout.rollout_id, rollout.attempt.attempt_id, worker_id=worker_id, status="succeeded"
        )


async def report(store: Store) -> None:
    for worker in (await store.query_workers()).items:
        print(f"{worker.worker_id}: {worker.status}")
    taken: Counter[str | None] = Counter()
    for rollout in (await store.query_rollouts()).items:
        attempts = await store.query_attempts(rollout.rollout_id)
        taken.update(attempt.worker_id for attempt in attempts.items)
    print("taken:", ", ".join(f"{worker_id} {count}" for worker_id, count in sorted(taken.items())))
    print("claimed and not finished:", (await store.query_rollouts(status="preparing")).total)


async def as_coroutines(workers: int, rollouts: int, most: int, poll_interval: float) -> None:
    store = MemoryStore()
    await create_rollouts(store, rollouts)
    await asyncio.gather(
        *(worker_task(f"worker-{number}", store, most, poll_interval) for number in range(workers))
    )
    await report(store)
    await store.close()


async def as_processes(workers: int, rollouts: int, most: int, poll_interval: float) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        store = await open_store(str(path))
        await create_rollouts(store, rollouts)
        spawn = get_context("spawn")
        ready = spawn.Barrier(workers)
        processes = [
            spawn.Process(target=run_worker, args=(str(path), f"worker-{number}", most, poll_interval, ready))
            for number in range(workers)
        ]
        for process in processes:
            process.start()
        for process in processes:
            await asyncio.to_thread(process.join)
        await report(store)
        await store.close()


def run_worker(path: str, worker_id: str, most: int, poll_interval: float, ready: Barrier) -> None:
    """One process: its own connection to the same store. They begin together, so that they share evenly."""

    async def work() -> None:
        store = await open_store(path)
        ready.wait()
        await worker_task(worker_id, store, most, poll_interval)
        await store.close()

    asyncio.run(work())


def main(
    workers: Annotated[int, typer.Option(min=1)] = 4,
    rollouts: Annotated[int, typer.Option(min=0)] = 20,
    max_rollouts: Annotated[int, typer.Option(min=1, help="Most for each worker.")] = 1000,
    poll_interval: Annotated[float, typer.Option(help="Seconds to wait for a rollout.")] = 0.5,
    processes: Annotated[bool, typer.Option("--processes", help="Workers as processes.")] = False,
) -> None:
    """Create rollouts, start workers, see who takes what."""
    share = as_processes if processes else as_coroutines
    asyncio.run(share(workers, rollouts, max_rollouts, poll_interval))


if __name__ == "__main__":
    typer.run(main)
