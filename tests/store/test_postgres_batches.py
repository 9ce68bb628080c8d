"""Calls of many callers on PostgreSQL share a statement and a commit, and mean what they mean alone."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from rollwright.store.errors import AttemptRefused, StoreError
from rollwright.store.invariants import complaints
from rollwright.store.records import AttemptedRollout, EnqueueRequest, RolloutConfig
from rollwright.store.sql import SqlStore, postgres_batches
from rollwright.store.sql.postgres import PostgresDriver
from rollwright.store.sql.postgres_news import Notifications

CALLERS = 32


@pytest.fixture
async def schema(postgres_url: str, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    name = f"batch_{abs(hash(request.node.name)) % 10**9}"
    yield name
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')
    await connection.close()


@pytest.fixture
async def store(postgres_url: str, schema: str) -> AsyncIterator[SqlStore]:
    opened = SqlStore(await PostgresDriver.open(postgres_url, schema))
    yield opened
    await opened.close()


@pytest.fixture
async def commits(postgres_url: str) -> AsyncIterator["Commits"]:
    connection = await asyncpg.connect(postgres_url)
    yield Commits(connection)
    await connection.close()


class Commits:
    """Counts the transactions of the whole server that wrote something."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def count(self) -> int:
        # Reading the next number writes nothing, and so does not use one up.
        return int(
            await self._connection.fetchval("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
        )


def pair(claimed: AttemptedRollout) -> tuple[str, str]:
    return claimed.rollout_id, claimed.attempt.attempt_id


async def claim_all(store: SqlStore, count: int) -> list[AttemptedRollout]:
    claimed = await asyncio.gather(*(store.dequeue_rollout(f"worker-{n}") for n in range(count)))
    assert all(claimed)
    return [each for each in claimed if each is not None]


async def test_callers_of_the_same_moment_share_a_commit(store: SqlStore, commits: Commits) -> None:
    before = await commits.count()
    await asyncio.gather(*(store.enqueue_rollout({"n": n}, rollout_id=f"ro-{n}") for n in range(CALLERS)))
    claimed = await claim_all(store, CALLERS)
    await asyncio.gather(*(store.append_journal(*pair(each), [b"a turn"]) for each in claimed))
    await asyncio.gather(
        *(store.update_attempt(*pair(each), status="succeeded", trajectory=b"t") for each in claimed)
    )
    # One each to enqueue, claim, journal and finish; a few for notifications, signs of life and other tests' servers.
    assert await commits.count() - before <= CALLERS // 2
    assert [each.cursor for each in await store.read_completions()] == list(range(1, CALLERS + 1))
    assert len(await store.get_trajectories([each.rollout_id for each in claimed])) == CALLERS
    assert complaints(await store.read_events(), await store.read_completions()) == []


async def test_callers_get_the_rollouts_in_the_order_of_their_calls(store: SqlStore) -> None:
    await store.enqueue_many_rollouts([EnqueueRequest(n, f"ro-{n}", priority=n % 2) for n in range(8)])
    claimed = await asyncio.gather(
        *(store.dequeue_many_rollouts(2, f"worker-{n}") for n in range(3)), store.dequeue_rollout("last")
    )
    *several, last = claimed
    assert [[each.rollout_id for each in some] for some in several] == [  # type: ignore[union-attr]
        ["ro-1", "ro-3"],
        ["ro-5", "ro-7"],
        ["ro-0", "ro-2"],
    ]
    assert last.rollout_id == "ro-4"  # type: ignore[union-attr]
    assert last.attempt.worker_id == "last"  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [5, postgres_batches.COPY_ROWS + 50])
async def test_new_rollouts_keep_their_order_and_existing_ones_are_returned(
    store: SqlStore, count: int
) -> None:
    first = await store.enqueue_rollout("first", rollout_id="ro-3")
    given = await store.enqueue_many_rollouts([EnqueueRequest(n, f"ro-{n}") for n in range(count)])
    assert [each.rollout_id for each in given] == [f"ro-{n}" for n in range(count)]
    assert given[3] == first, "an id that exists returns that rollout"
    claimed = await store.dequeue_many_rollouts(count, "worker")
    assert [each.rollout_id for each in claimed] == ["ro-3", *(f"ro-{n}" for n in range(count) if n != 3)]
    assert len(await store.read_events(limit=10_000)) == 2 * count


async def test_one_refused_report_does_not_touch_the_others(store: SqlStore) -> None:
    await store.enqueue_many_rollouts([EnqueueRequest(n, f"ro-{n}") for n in range(4)])
    claimed = await claim_all(store, 4)
    await store.cancel_rollouts(["ro-1"], "enough")
    outcomes = await asyncio.gather(
        *(store.update_attempt(*pair(each), status="succeeded") for each in claimed),
        store.update_attempt(*pair(claimed[0]), status="succeeded"),  # the same report again
        store.update_attempt("ro-2", claimed[0].attempt.attempt_id, status="succeeded"),
        return_exceptions=True,
    )
    kinds = [type(each) if isinstance(each, Exception) else each.status.value for each in outcomes]  # type: ignore[union-attr]
    assert kinds[:5] == ["succeeded", AttemptRefused, "succeeded", "succeeded", "succeeded"]
    assert isinstance(outcomes[5], StoreError)
    assert len(await store.read_completions()) == 4
    assert complaints(await store.read_events(), await store.read_completions()) == []


async def test_turns_of_the_same_moment_are_journalled_once_and_in_order(store: SqlStore) -> None:
    await store.enqueue_rollout(None, rollout_id="ro-0")
    [claimed] = await claim_all(store, 1)
    await asyncio.gather(
        *(store.append_journal(*pair(claimed), [b"%d" % n], append_id=f"ap-{n}") for n in (1, 1)),
    )
    await store.append_journal(*pair(claimed), [b"2", b"3"], append_id="ap-2")
    assert await store.read_journal("ro-0") == [b"1", b"2", b"3"]
    assert [each.status.value for each in await store.query_rollouts()] == ["running"]
    await store.update_attempt(*pair(claimed), status="succeeded")
    assert await store.read_journal("ro-0") == []


async def test_a_heartbeat_extends_leases_and_names_what_is_lost(store: SqlStore) -> None:
    config = RolloutConfig(unresponsive_seconds=5.0)
    await store.enqueue_many_rollouts([EnqueueRequest(n, f"ro-{n}", config=config) for n in range(2)])
    claimed = await store.dequeue_many_rollouts(2, "worker")
    await store.cancel_rollouts(["ro-1"], "enough")
    await asyncio.sleep(0.06)  # more than a hundredth of the lease
    assert await store.update_worker("worker", attempts=[pair(claimed[0])]) == []
    assert await store.update_worker("worker", attempts=[pair(each) for each in claimed]) == [
        pair(claimed[1])
    ]
    now = await store.get_latest_attempt("ro-0")
    assert now is not None
    assert now.lease_expires is not None
    assert claimed[0].attempt.lease_expires is not None
    assert now.lease_expires > claimed[0].attempt.lease_expires


async def test_a_commit_whose_announcement_was_lost_is_found(
    postgres_url: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = SqlStore(await PostgresDriver.open(postgres_url, schema))
    dies = SqlStore(await PostgresDriver.open(postgres_url, schema))
    dequeuing = asyncio.create_task(waits.dequeue_rollout("worker", timeout=60))
    monkeypatch.setattr(Notifications, "announce", lambda self, changes: None)
    await dies.enqueue_rollout(None, rollout_id="ro-0")
    claimed = await asyncio.wait_for(dequeuing, 30)
    assert claimed is not None
    assert claimed.rollout_id == "ro-0"
    for store in (waits, dies):
        await store.close()


async def test_tables_of_the_queue_are_vacuumed_by_the_number_of_changes(
    store: SqlStore, postgres_url: str, schema: str
) -> None:
    connection = await asyncpg.connect(postgres_url)
    rows = await connection.fetch(
        "SELECT relname, reloptions::text FROM pg_class WHERE relnamespace = $1::regnamespace AND relkind = 'r'",
        schema,
    )
    await connection.close()
    options = dict(rows)
    for table in ("rollouts", "attempts", "trajectories", "journal", "completions", "events", "counters"):
        assert "autovacuum_vacuum_threshold" in options[table], table
