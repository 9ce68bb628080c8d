"""What the writer remembers of held rollouts is what the file says, whatever was done, also by another process."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rollwright import rng
from rollwright.store.errors import AttemptRefused, StoreError
from rollwright.store.records import EnqueueRequest, RolloutConfig
from rollwright.store.sql import SqlStore, transaction
from rollwright.store.sql.rows import ROLLOUT_COLUMNS
from rollwright.store.sql.sqlite import SqliteDriver

COLUMNS = ", ".join(column.name for column in ROLLOUT_COLUMNS[:-1])


def check_memory(store: SqlStore) -> int:
    """How many rollouts are remembered, each of them as it is in the file."""
    writer = store._driver._writer  # type: ignore[attr-defined]
    writer._check_other_writers()
    for rollout_id, row in writer._held.items():
        sql = f"SELECT {COLUMNS} FROM rollouts WHERE rollout_id = ?"
        [found] = writer._connection.execute(sql, [rollout_id]).fetchall()
        known = [getattr(row, name) for name in type(row).__struct_fields__]
        assert known == [*found, b""], rollout_id
        assert row.attempt_id is not None
    return len(writer._held)


async def one_step(
    store: SqlStore, other: SqlStore, case: int, step: int, played: list[tuple[str, str]]
) -> None:
    """Something that a worker or a caller may do, to whatever rollout."""

    def pick(count: int, *key: Any) -> int:
        return int(rng.uniform("step", case, step, *key) * count)

    who = other if pick(5, "who") == 0 else store
    pair = played[pick(len(played), "pair")] if played else ("ro-0", "latest")
    worker = f"w-{pick(2, 'worker')}"
    match pick(14, "what"):
        case 0 | 1 | 2:
            limit = 1 + pick(2, "limit")
            claims = await asyncio.gather(*(who.dequeue_many_rollouts(limit, worker) for _ in range(2)))
            played += [(each.rollout_id, each.attempt.attempt_id) for claimed in claims for each in claimed]
        case 3 | 4:
            await asyncio.gather(*(who.update_worker(worker, attempts=[each]) for each in (pair, played[-1])))
        case 5:
            await who.update_worker(worker, attempts=None)
        case 6:
            await who.update_worker(worker, attempts=played[-3:], heartbeat_stats={"n": step})
        case 7:
            await who.append_journal(*pair, [b"turn"])
        case 8:
            await who.update_attempt(*pair, metadata={"step": step}, worker_id=worker)
        case 9:
            status = ("succeeded", "failed", "cancelled", "running")[pick(4, "status")]
            await asyncio.gather(
                *(who.update_attempt(*each, status=status) for each in (pair, played[-1], pair)),
                return_exceptions=True,
            )
        case 10:
            await who.update_rollout(pair[0], metadata={"step": step}, priority=pick(3, "priority"))
        case 11:
            await who.update_rollout(pair[0], status="requeuing")
        case 12:
            await who.cancel_rollouts([pair[0]], "enough")
        case 13:
            await who.clear_journal(*pair)


@pytest.mark.parametrize("case", range(4))
async def test_what_is_remembered_of_held_rollouts_is_what_the_file_says(tmp_path: Path, case: int) -> None:
    now = time.time()
    store = SqlStore(await SqliteDriver.open(tmp_path / "store.db", lambda: now))
    other = SqlStore(await SqliteDriver.open(tmp_path / "store.db", lambda: now))
    config = RolloutConfig(unresponsive_seconds=30, max_attempts=50)
    await store.enqueue_many_rollouts([EnqueueRequest(n, f"ro-{n}", config=config) for n in range(60)])
    remembered, played = 0, [(await store.start_attempt("ro-0", "w-0"))]
    pairs = [(each.rollout_id, each.attempt.attempt_id) for each in played]
    for step in range(150):
        now += 2 * rng.uniform("time", case, step) ** 4
        with suppress(StoreError):  # what is refused, too, must leave it right
            await one_step(store, other, case, step, pairs)
        remembered += check_memory(store)
        check_memory(other)
    assert remembered > 100, "else nothing was tested"
    await store.close()
    await other.close()


async def test_an_attempt_that_another_process_took_is_refused_at_once(tmp_path: Path) -> None:
    """Heartbeats and reports of the same moment, which a process would answer from what it remembers."""
    here = SqlStore(await SqliteDriver.open(tmp_path / "store.db"))
    there = SqlStore(await SqliteDriver.open(tmp_path / "store.db"))
    for number in range(20):
        claimed = await here.start_rollout(number, worker_id="w")
        pair = (claimed.rollout_id, claimed.attempt.attempt_id)
        assert await here.update_worker("w", attempts=[pair]) == []
        await there.cancel_rollouts([claimed.rollout_id], "enough")
        if number % 2:
            assert await here.update_worker("w", attempts=[pair]) == [pair]
        with pytest.raises(AttemptRefused):
            await here.update_attempt(*pair, status="succeeded", trajectory=b"late")
    assert (await there.statistics())["succeeded"] == 0
    await here.close()
    await there.close()


async def test_no_more_is_remembered_than_a_process_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "MOST_HELD", 10)
    store = SqlStore(await SqliteDriver.open(tmp_path / "store.db"))
    claimed = [await store.start_rollout(number, worker_id="w") for number in range(25)]
    assert 0 < check_memory(store) <= 10
    pairs = [(each.rollout_id, each.attempt.attempt_id) for each in claimed]
    assert await store.update_worker("w", attempts=pairs) == []
    ended = await asyncio.gather(*(store.update_attempt(*pair, status="succeeded") for pair in pairs))
    assert [each.status for each in ended] == ["succeeded"] * 25
    await store.close()


async def test_a_heartbeat_that_is_remembered_is_answered_without_a_round_of_the_event_loop(
    tmp_path: Path,
) -> None:
    """And one that comes after another store took the rollout says so."""
    store, other = [SqlStore(await SqliteDriver.open(tmp_path / "store.db")) for _ in range(2)]
    claimed = await store.start_rollout(None, worker_id="w", config=RolloutConfig(unresponsive_seconds=3600))
    pair = (claimed.rollout_id, claimed.attempt.attempt_id)
    await store.update_worker("w", attempts=[pair])  # what opening the other store wrote is known now
    for _ in range(3):
        with pytest.raises(StopIteration) as answered:
            store.update_worker("w", attempts=[pair]).send(None)
        assert answered.value.value == []
    await other.cancel_rollouts([claimed.rollout_id], "not needed")
    assert await store.update_worker("w", attempts=[pair]) == [pair]
    for each in (store, other):
        await each.close()
