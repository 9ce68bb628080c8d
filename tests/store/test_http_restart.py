"""The server dies at any moment and comes back over the same database: every rollout ends exactly once."""

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from pathlib import Path

import pytest

from rollwright.store.api import Store
from rollwright.store.errors import AttemptRefused
from rollwright.store.http.client import HttpStore
from rollwright.store.http.retry import RetryRule
from rollwright.store.records import EnqueueRequest, RolloutStatus

SERVER = """
import asyncio, pathlib, sys
from rollwright.store.http.server import StoreServer
from rollwright.store.sql import SqlStore
from rollwright.store.sql.sqlite import SqliteDriver

async def main():
    store = SqlStore(await SqliteDriver.open(pathlib.Path(sys.argv[1])))
    async with StoreServer(store, port=int(sys.argv[2])) as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await store.close()

asyncio.run(main())
"""

ROLLOUTS = 60
WORKERS = 6
KILLS = 3
PATIENT = RetryRule(give_up_after=60, first=0.02, longest=0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def start(database: Path, port: int) -> Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, str(database), str(port), stdin=PIPE, stdout=PIPE
    )
    assert process.stdout is not None
    assert (await process.stdout.readline()).startswith(b"http://")
    return process


async def play(store: Store, worker_id: str, taken: Counter[str]) -> None:
    while (claimed := await store.dequeue_rollout(worker_id, timeout=1.0)) is not None:
        pair = (claimed.rollout_id, claimed.attempt.attempt_id)
        await store.append_journal(*pair, [b"turn"])
        await asyncio.sleep(0.02)
        try:
            await store.update_attempt(*pair, status="succeeded", trajectory=worker_id.encode())
        except AttemptRefused:
            continue
        taken[claimed.rollout_id] += 1


async def test_a_killed_server_loses_and_doubles_nothing(tmp_path: Path) -> None:
    database, port = tmp_path / "store.db", free_port()
    server = await start(database, port)
    store = HttpStore(f"http://127.0.0.1:{port}", retry=PATIENT)
    names = [f"ro-{number}" for number in range(ROLLOUTS)]
    await store.enqueue_many_rollouts([EnqueueRequest(input=None, rollout_id=name) for name in names])
    committed: Counter[str] = Counter()
    async with asyncio.timeout(60), asyncio.TaskGroup() as workers:
        ended = workers.create_task(store.wait_for_rollouts(names))
        for number in range(WORKERS):
            workers.create_task(play(store, f"worker-{number}", committed))
        for _ in range(KILLS):
            await asyncio.sleep(0.1)
            server.send_signal(signal.SIGKILL)
            await server.wait()
            server = await start(database, port)
    assert [each.status for each in ended.result()] == [RolloutStatus.SUCCEEDED] * ROLLOUTS
    assert committed == Counter(names)
    completions = await store.read_completions()
    assert sorted(each.rollout_id for each in completions) == sorted(names)
    assert (await store.statistics())["attempts"] == ROLLOUTS
    assert [await store.read_journal(name) for name in names] == [[]] * ROLLOUTS
    await store.close()
    assert server.stdin is not None
    server.stdin.close()
    assert await server.wait() == 0


SERVE = """
import asyncio, sys
from rollwright.store.http.server import serve
from rollwright.store.memory import MemoryStore

async def main():
    await serve(MemoryStore(), path=sys.argv[1])
    print("store closed")

asyncio.run(main())
"""


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_the_server_while_callers_wait(tmp_path: Path, stop: signal.Signals) -> None:
    path = tmp_path / "store.sock"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVE, str(path), stdout=PIPE)
    store = HttpStore(f"http+unix://{path}", retry=PATIENT)
    await store.enqueue_rollout(None, rollout_id="ro-1")
    waiting = asyncio.create_task(store.wait_for_rollouts(["ro-1"]))
    await asyncio.sleep(0.1)
    process.send_signal(stop)
    async with asyncio.timeout(20):
        output, _ = await process.communicate()
    assert output == b"store closed\n"
    assert process.returncode == 0
    assert not path.exists()
    await store.close()
    assert await waiting == []
