"""A heartbeat just after a claim is answered without a round trip, and never contradicts what happened before it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from rollwright import rng
from rollwright.store.checks import EMPTY, config_to_bytes
from rollwright.store.records import AttemptedRollout, AttemptStatus, EnqueueRequest, RolloutConfig
from rollwright.store.sql import SqlStore, postgres_recent
from rollwright.store.sql.attempts import recall_heartbeat
from rollwright.store.sql.postgres import PostgresDriver
from rollwright.store.sql.postgres_recent import FRESH_SECONDS, RecentClaims, StatementNews
from rollwright.store.sql.rows import RolloutRow
from rollwright.store.sql.transaction import Stamps

CONFIG = RolloutConfig(unresponsive_seconds=3600.0)
SERVER = 5_000_000.0
"""The server's clock when that of the process shows 0."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def row(config: RolloutConfig = CONFIG, claimed: float = SERVER) -> RolloutRow:
    lease = None if config.unresponsive_seconds is None else claimed + config.unresponsive_seconds
    return RolloutRow(
        1, "ro-1", "preparing", claimed, None, None, None, config_to_bytes(config), EMPTY, 0, 1, 1,
        "at-1", "worker", claimed, claimed, lease, None, None,
    )  # fmt: skip


class Process:
    """One process with a clock of its own; its statements take a millisecond."""

    def __init__(self, server_rate: float = 1.0) -> None:
        self.clock = Clock()
        self.rate = server_rate
        self.stamps = Stamps()
        self.recent = RecentClaims(self.stamps, self.clock)

    @property
    def server(self) -> float:
        return SERVER + self.clock.now * self.rate

    def statement(self, claimed: list[RolloutRow] | None = None, ended: list[str] | None = None) -> None:
        sent = self.recent.sending()
        self.clock.now += 0.001
        news = StatementNews(self.stamps, self.server, claimed or [], ended or [])
        self.recent.learn(sent, news)
        self.clock.now += 0.001

    def heartbeat(self, worker: str = "worker") -> list[Any] | None:
        return self.recent.recall(recall_heartbeat, (worker, None, [("ro-1", "at-1")]))


def test_a_claim_is_remembered_for_a_moment() -> None:
    process = Process()
    process.statement()
    process.statement([row()])
    assert process.heartbeat() == []
    assert process.heartbeat("another") is None
    process.clock.now += FRESH_SECONDS
    assert process.heartbeat() is None


def test_claims_of_a_process_without_heartbeats_are_forgotten() -> None:
    process = Process()
    for _ in range(1000):
        process.statement([row()])
    assert len(process.recent._expiries) <= FRESH_SECONDS / 0.002 + 1


@pytest.mark.parametrize("rate", [0.0, 0.1, 10.0])
def test_without_agreement_of_the_clocks_every_heartbeat_is_sent(rate: float) -> None:
    process = Process(rate)
    process.statement()
    process.statement([row()])
    assert process.heartbeat() is None


def test_a_jump_of_the_servers_clock_is_noticed_by_the_next_statement() -> None:
    process = Process()
    process.statement()
    process.statement([row()])
    assert process.heartbeat() == []
    process.clock.now += 0.001
    sent = process.recent.sending()
    process.recent.learn(sent, StatementNews(process.stamps, process.server + 20.0))
    assert process.heartbeat() is None


@pytest.mark.parametrize("seconds", [0.01, 0.2])
def test_a_short_lease_is_not_answered_past_its_end_or_its_hundredth(seconds: float) -> None:
    process = Process()
    process.statement()
    process.statement([row(RolloutConfig(unresponsive_seconds=seconds), process.server + 0.001)])
    process.clock.now += seconds * 0.01
    assert process.heartbeat() is None


def test_an_end_is_seen_also_if_it_overtakes_the_answer_to_the_claim() -> None:
    process = Process()
    process.statement()
    process.statement([row()])
    process.statement(ended=["ro-1"])
    assert process.heartbeat() is None
    claim = process.recent.sending()
    process.statement(ended=["ro-1"])  # another caller read of the claim in the database, and ended it
    process.recent.learn(claim, StatementNews(process.stamps, process.server, [row()]))
    assert process.heartbeat() is None


def test_nothing_is_remembered_of_a_claim_that_ran_beside_an_ordinary_transaction() -> None:
    process = Process()
    process.statement()
    claim = process.recent.sending()
    process.recent.clear()
    process.clock.now += 0.001
    process.recent.learn(claim, StatementNews(process.stamps, process.server, [row()]))
    assert process.heartbeat() is None


# -- with a real server ----------------------------------------------------------------------------


@pytest.fixture
async def schema(postgres_url: str, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    name = f"recent_{abs(hash(request.node.name)) % 10**9}"
    yield name
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')
    await connection.close()


@pytest.fixture
async def store(postgres_url: str, schema: str) -> AsyncIterator[SqlStore]:
    opened = SqlStore(await PostgresDriver.open(postgres_url, schema))
    yield opened
    await opened.close()


def pair(claimed: AttemptedRollout) -> tuple[str, str]:
    return claimed.rollout_id, claimed.attempt.attempt_id


async def claim_many(store: SqlStore, count: int, worker: str = "worker") -> list[AttemptedRollout]:
    await store.enqueue_many_rollouts([EnqueueRequest(n, config=CONFIG) for n in range(count)])
    return await store.dequeue_many_rollouts(count, worker)


@pytest.fixture
def for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered does not age: so a test on a slow machine depends on nothing else."""
    monkeypatch.setattr(postgres_recent, "FRESH_SECONDS", 3600.0)


@pytest.mark.usefixtures("for_ever")
async def test_a_heartbeat_just_after_a_claim_takes_no_round_trip(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = await claim_many(store, 2)
    queued = store._driver._queues[False]  # type: ignore[attr-defined]
    sent: list[Any] = []
    put = queued.put
    monkeypatch.setattr(queued, "put", lambda job: (sent.append(job), put(job)))
    assert await store.update_worker("worker", attempts=[pair(each) for each in claimed]) == []
    assert not sent
    assert await store.update_worker("another", attempts=[pair(claimed[0])]) == [pair(claimed[0])]
    assert len(sent) == 1
    [worker] = [each for each in await store.query_workers() if each.worker_id == "worker"]
    assert worker.last_heartbeat_time is not None


@pytest.mark.usefixtures("for_ever")
async def test_what_this_process_changed_is_known_to_its_next_heartbeat(store: SqlStore) -> None:
    cancelled, ended, handed_on, kept = await claim_many(store, 4)
    await store.cancel_rollouts([cancelled.rollout_id], "enough")
    assert await store.update_worker("worker", attempts=[pair(cancelled)]) == [pair(cancelled)]
    await store.update_attempt(*pair(ended), status="succeeded")
    assert await store.update_worker("worker", attempts=[pair(ended)]) == [pair(ended)]
    await store.finish_and_dequeue(*pair(handed_on), status="succeeded", worker_id="worker")
    assert await store.update_worker("worker", attempts=[pair(handed_on)]) == [pair(handed_on)]
    assert await store.update_worker("worker", attempts=[pair(kept)]) == []


async def test_what_another_process_took_is_known_a_moment_later(
    store: SqlStore, postgres_url: str, schema: str
) -> None:
    other = SqlStore(await PostgresDriver.open(postgres_url, schema))
    [claimed] = await claim_many(store, 1)
    await other.cancel_rollouts([claimed.rollout_id], "enough")
    await asyncio.sleep(FRESH_SECONDS)
    assert await store.update_worker("worker", attempts=[pair(claimed)]) == [pair(claimed)]
    await other.close()


@pytest.mark.usefixtures("for_ever")
@pytest.mark.parametrize("case", range(3))
async def test_heartbeats_say_what_the_database_says(store: SqlStore, case: int) -> None:
    played: list[tuple[str, str]] = []

    def pick(count: int, *key: Any) -> int:
        return int(rng.uniform("recent", case, *key) * count)

    for step in range(40):
        pairs = [played[pick(len(played), step, n)] for n in range(2)] if played else []
        match pick(7, step, "what"):
            case 0 | 1 | 2:
                workers = [f"w-{pick(2, step, n)}" for n in range(2)]
                given = await asyncio.gather(*(claim_many(store, 1, worker) for worker in workers))
                played += [pair(each) for claimed in given for each in claimed]
            case 3:
                await asyncio.gather(
                    *(store.update_attempt(*each, status="succeeded") for each in pairs),
                    return_exceptions=True,
                )
            case 4:
                await asyncio.gather(
                    *(
                        store.finish_and_dequeue(*each, status="succeeded", worker_id="w-0")
                        for each in pairs[:1]
                    ),
                    *(store.append_journal(*each, [b"turn"]) for each in pairs[1:]),
                    return_exceptions=True,
                )
            case 5:
                await store.cancel_rollouts([each for each, _ in pairs], "enough")
            case 6 if pairs:
                await asyncio.gather(store.update_attempt(*pairs[0], status="failed"), return_exceptions=True)
        for rollout_id, attempt_id in played[-4:]:
            for worker in ("w-0", "w-1"):
                lost = await store.update_worker(worker, attempts=[(rollout_id, attempt_id)])
                [found] = [
                    each for each in await store.query_attempts(rollout_id) if each.attempt_id == attempt_id
                ]
                holds = found.worker_id == worker and found.status in (
                    AttemptStatus.PREPARING,
                    AttemptStatus.RUNNING,
                )
                assert (not lost) == holds, (step, rollout_id, worker)
