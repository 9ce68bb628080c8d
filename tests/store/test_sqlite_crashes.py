"""A SQLite store whose processes are killed, frozen, or whose log is cut: nothing is lost, nothing counts twice."""

import asyncio
import shutil
import signal
import sqlite3
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from rollwright import rng
from rollwright.store.api import Store
from rollwright.store.errors import AttemptRefused
from rollwright.store.invariants import complaints, unfinished
from rollwright.store.records import EnqueueRequest, RolloutConfig, RolloutStatus
from rollwright.store.sql import SqlStore
from rollwright.store.sql.sqlite import SqliteDriver

PROGRAM = Path(__file__).with_name("store_worker.py")


async def opened(path: Path) -> Store:
    return SqlStore(await SqliteDriver.open(path))


async def start(*arguments: object) -> Process:
    words = [str(each) for each in arguments]
    return await asyncio.create_subprocess_exec(sys.executable, str(PROGRAM), *words, stdin=PIPE, stdout=PIPE)


async def said(process: Process) -> list[list[str]]:
    assert process.stdout is not None
    return [line.split() for line in (await process.stdout.read()).decode().splitlines()]


async def line_of(process: Process) -> list[str]:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), 30)).decode().split()


async def enqueue(path: Path, count: int, lease: float) -> None:
    store = await opened(path)
    config = RolloutConfig(unresponsive_seconds=lease, max_attempts=100)
    await store.enqueue_many_rollouts([EnqueueRequest(n, f"ro-{n}", config=config) for n in range(count)])
    await store.close()


@pytest.mark.parametrize("how", ["play", "play_on"])
async def test_workers_are_killed_at_random_moments(tmp_path: Path, how: str) -> None:
    path, count = tmp_path / "store.db", 400
    await enqueue(path, count, lease=0.5)
    confirmed: dict[str, str] = {}
    for attack in range(3):
        workers = [await start(how, path, f"w{attack}{number}", 4, 0.002) for number in range(2)]
        for worker in workers:
            assert await line_of(worker) == ["ready"]
        await asyncio.sleep(0.05 + 0.25 * rng.uniform("kill", attack))
        for worker in workers:
            worker.kill()
        for worker in workers:
            confirmed |= {
                line[1]: line[2] for line in await said(worker) if line[0] == "done" and len(line) == 3
            }
            await worker.wait()
    last = await start(how, path, "last", 8, 0)
    confirmed |= {line[1]: line[2] for line in await said(last) if line[0] == "done"}
    assert await last.wait() == 0

    store = await opened(path)
    counts = await store.statistics()
    assert counts["succeeded"] == count, counts
    trajectories = await store.get_trajectories([f"ro-{n}" for n in range(count)])
    assert len(confirmed) > count / 2
    for rollout_id, attempt_id in confirmed.items():
        assert trajectories[rollout_id] == attempt_id.encode(), "a confirmed result was lost or replaced"
    events = await store.read_events(limit=100_000)
    assert complaints(events, await store.read_completions(limit=count * 2)) == []
    assert unfinished(events) == set()
    await store.close()


def written(path: Path, folder: Path) -> int:
    """How much of the log's file holds commits; found in a copy, because looking ends the log."""
    folder.mkdir()
    for each in (path, path.with_name(f"{path.name}-wal")):
        shutil.copy(each, folder)
    connection = sqlite3.connect(folder / path.name)
    [page] = connection.execute("PRAGMA page_size").fetchone()
    [_, frames, _] = connection.execute("PRAGMA wal_checkpoint").fetchone()
    connection.close()
    header, frame_header = 32, 24
    return int(header + frames * (frame_header + page))


@pytest.mark.parametrize("how", ["play", "play_on"])
async def test_the_log_is_cut_off_at_random_bytes(tmp_path: Path, how: str) -> None:
    path, count = tmp_path / "store.db", 60
    await enqueue(path, count, lease=0.05)
    worker = await start(how, path, "w", 4, 0)
    assert await line_of(worker) == ["ready"]
    for _ in range(80):
        await line_of(worker)
    worker.kill()
    await worker.wait()
    log = tmp_path / "store.db-wal"
    size = written(path, tmp_path / "whole")
    assert 50_000 < size < log.stat().st_size
    finished = []
    for cut in range(12):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        shutil.copy(path, folder)
        data = log.read_bytes()
        (folder / "store.db-wal").write_bytes(data[: rng.digest("cut", cut) % size])
        store = await opened(folder / "store.db")
        await is_whole(folder / "store.db", store)
        finished.append((await store.statistics())["succeeded"])
        while claimed := await store.dequeue_rollout("after", timeout=0.2):
            with suppress(AttemptRefused):  # on a busy machine the lease may be over already: it comes again
                await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
        await is_whole(folder / "store.db", store)
        counts = await store.statistics()
        assert counts["succeeded"] == sum(counts[status] for status in RolloutStatus)
        await store.close()
    assert len(set(finished)) > 3, "the cuts hit different moments"


async def is_whole(path: Path, store: Store) -> None:
    """The file is sound, and its tables tell one and the same story."""
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        orphans = "SELECT count(*) FROM {} WHERE place NOT IN (SELECT place FROM rollouts)"
        for table in ("attempts", "trajectories", "journal", "completions"):
            assert connection.execute(orphans.format(table)).fetchone() == (0,)
    connection.close()
    events = await store.read_events(limit=100_000)
    assert complaints(events, await store.read_completions(limit=10_000)) == []
    rollouts = await store.query_rollouts()
    open_ids = {each.rollout_id for each in rollouts if each.end_time is None}
    assert unfinished(events) == open_ids


async def test_a_frozen_worker_loses_its_rollout_and_its_late_commit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await enqueue(path, 1, lease=4.0)  # long enough to commit in, also on a busy machine
    frozen = await start("hold", path, "frozen")
    word, rollout_id, attempt_id = await line_of(frozen)
    assert word == "took"
    await asyncio.sleep(0.3)  # what follows a claim is written: frozen in it, SQLite's lock would hold up all
    frozen.send_signal(signal.SIGSTOP)
    store = await opened(path)
    taken_over = await store.dequeue_rollout("other", timeout=30)
    assert taken_over is not None
    assert taken_over.attempt.sequence_id == 2
    await store.update_rollout(rollout_id, config=RolloutConfig(unresponsive_seconds=600))
    assert await store.update_worker("other") == []  # from here on it may take its time
    frozen.send_signal(signal.SIGCONT)
    assert frozen.stdin is not None
    frozen.stdin.write(b"commit\n")
    assert await line_of(frozen) == ["refused", rollout_id, attempt_id]
    await frozen.wait()
    await store.update_attempt(
        rollout_id, taken_over.attempt.attempt_id, status="succeeded", trajectory=b"mine"
    )
    assert await store.get_trajectories([rollout_id]) == {rollout_id: b"mine"}
    assert complaints(await store.read_events(), await store.read_completions()) == []
    await store.close()


async def test_processes_share_the_work_and_none_is_starved(tmp_path: Path) -> None:
    path, count, processes = tmp_path / "store.db", 600, 3
    await enqueue(path, 1, lease=60)
    workers = [await start("play", path, f"p{number}", 2, 0) for number in range(processes)]
    for worker in workers:
        assert await line_of(worker) == ["ready"]
    await enqueue(path, count, lease=60)
    lines = [await said(worker) for worker in workers]
    shares = Counter({number: sum(line[0] == "done" for line in each) for number, each in enumerate(lines)})
    assert sum(shares.values()) >= count
    assert min(shares.values()) > count / processes / 4, shares
    done = [line[1] for each in lines for line in each if line[0] == "done"]
    assert len(done) == len(set(done))
    for worker in workers:
        assert await worker.wait() == 0
