"""What users of other stores write works here with only the imports changed (C1–C6, C9)."""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollwright.store.api import Store
from rollwright.store.http.server import StoreServer
from rollwright.store.memory import MemoryStore


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    made = MemoryStore()
    for number in range(1, 21):
        await made.enqueue_rollout({"prompt": f"Task {number}", "task_id": number})
    yield made
    await made.close()


class Runner:
    """The loop around the snippets: takes a rollout, claims it, works, finishes it."""

    def __init__(self, worker_id: int, store: Store) -> None:
        self._worker_id = worker_id
        self._store = store

    def get_worker_id(self) -> str:
        return str(self._worker_id)

    async def iter(self) -> None:
        store = self._store
        while True:
            next_rollout = await store.dequeue_rollout(worker_id=self.get_worker_id())
            if next_rollout is None:
                return
            rollout_id, attempt_id = next_rollout.rollout_id, next_rollout.attempt.attempt_id
            await store.update_attempt(rollout_id, attempt_id, worker_id=self.get_worker_id())
            await asyncio.sleep(0.005)
            await store.update_attempt(rollout_id, attempt_id, status="succeeded")


async def worker_task(worker_id: int, store: Store) -> None:
    await Runner(worker_id, store).iter()


async def handled(store: Store) -> Counter[str | None]:
    """How many rollouts each worker had."""
    counts: Counter[str | None] = Counter()
    for rollout in await store.query_rollouts():
        counts.update(attempt.worker_id for attempt in await store.query_attempts(rollout.rollout_id))
    return counts


async def test_four_worker_tasks_are_gathered_C1_C3(store: Store) -> None:
    tasks = [
        worker_task(worker_id=0, store=store),
        worker_task(worker_id=1, store=store),
        worker_task(worker_id=2, store=store),
        worker_task(worker_id=3, store=store),
    ]
    await asyncio.gather(*tasks)
    assert await handled(store) == {"0": 5, "1": 5, "2": 5, "3": 5}


async def test_the_store_says_who_is_there_and_who_handled_what_C2_C6(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    await worker_task(3, store)
    rollout_id = (await store.query_rollouts(limit=1)).items[0].rollout_id

    workers = await store.query_workers()
    for worker in workers.items:
        print(f"Worker-{worker.worker_id}: {worker.status}")

    attempts = await store.query_attempts(rollout_id)
    for attempt in attempts.items:
        print(f"Attempt {attempt.attempt_id} by Worker-{attempt.worker_id}")

    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Worker-3: idle"
    assert said[1].startswith("Attempt at-")
    assert said[1].endswith(" by Worker-3")


async def test_the_number_of_workers_can_be_computed_from_the_rollouts_C9(store: Store) -> None:
    await store.dequeue_many_rollouts(12, "0")
    rollouts = await store.query_rollouts(status="preparing")
    num_workers = min(rollouts.total, 10)
    assert (rollouts.total, num_workers) == (12, 10)
    waiting = await store.query_rollouts(status=["queuing", "requeuing"])
    assert min(waiting.total, 10) == 8


PROCESSES = """
import asyncio
import sys
from multiprocessing import Process

from rollwright.store.http.client import HttpStore

store = HttpStore(sys.argv[1])


async def worker_task(worker_id, store):
    while rollout := await store.dequeue_rollout(worker_id=str(worker_id)):
        await asyncio.sleep(0.05)
        await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
    await store.close()


def run_worker(worker_id):
    asyncio.run(worker_task(worker_id, store))

if __name__ == "__main__":
    processes = [
        Process(target=run_worker, args=(i,))
        for i in range(4)
    ]

    for p in processes:
        p.start()

    for p in processes:
        p.join()
"""


async def test_workers_in_processes_share_one_store_C3(store: Store, tmp_path: Path) -> None:
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES, encoding="utf-8")
    async with StoreServer(store) as server:
        process = await asyncio.create_subprocess_exec(sys.executable, str(script), server.url)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    counts: Any = await handled(store)
    assert sum(counts.values()) == 20
    assert set(counts) == {"0", "1", "2", "3"}
