"""Any sequence of calls has the same outcome in memory and in SQLite, and leaves a history without complaints."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.store.api import Store
from rollwright.store.errors import StoreError
from rollwright.store.invariants import complaints
from rollwright.store.memory import MemoryStore
from rollwright.store.records import AttemptStatus, RolloutConfig, RolloutStatus
from rollwright.store.sql import SqlStore
from rollwright.store.sql.sqlite import SqliteDriver
from rollwright.store.transitions import FINAL_ATTEMPT

rollout_ids = st.sampled_from(["ro-1", "ro-2", "ro-3"])
workers = st.sampled_from(["worker-0", "worker-1", None])
attempt_numbers = st.integers(1, 4)
configs = st.builds(
    RolloutConfig,
    timeout_seconds=st.sampled_from([None, 12.0]),
    unresponsive_seconds=st.sampled_from([None, 5.0, 10.0]),
    max_attempts=st.integers(1, 3),
    retry_condition=st.sampled_from([(), (AttemptStatus.FAILED,), (AttemptStatus.UNRESPONSIVE,)]),
)
steps = st.one_of(
    st.tuples(st.just("enqueue"), rollout_ids, configs, st.integers(-1, 1)),
    st.tuples(st.just("dequeue"), st.integers(1, 2), workers, st.sampled_from([None, "c1", "c2"])),
    st.tuples(st.just("start"), rollout_ids, workers),
    st.tuples(
        st.just("report"),
        rollout_ids,
        attempt_numbers,
        st.none() | st.sampled_from(AttemptStatus),
        workers,
        st.sampled_from([None, b"turns"]),
    ),
    st.tuples(
        st.just("finish"),
        rollout_ids,
        attempt_numbers,
        st.sampled_from(sorted(FINAL_ATTEMPT)),
        workers,
        st.sampled_from([None, "c1", "c3"]),
    ),
    st.tuples(
        st.just("heartbeat"),
        workers.filter(bool),
        st.none() | st.lists(st.tuples(rollout_ids, attempt_numbers)),
    ),
    st.tuples(st.just("append"), rollout_ids, attempt_numbers, st.sampled_from([None, "a1", "a2"])),
    st.tuples(st.just("clear"), rollout_ids, attempt_numbers),
    st.tuples(st.just("update"), rollout_ids, st.sampled_from(RolloutStatus), st.none() | configs),
    st.tuples(st.just("cancel"), st.lists(rollout_ids)),
    st.tuples(st.just("taken"), workers.filter(bool)),
    st.tuples(st.just("release"), st.lists(rollout_ids)),
    st.tuples(st.just("delete"), st.lists(rollout_ids)),
    st.tuples(st.just("retain"), st.sampled_from([0.0, 5.0])),
    st.tuples(st.just("advance"), st.sampled_from([1.0, 4.0, 5.0, 11.0])),
)


class Player:
    """Makes the calls on one store, and writes down what came of them without the random attempt ids."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.attempts: dict[tuple[str, int], str] = {}

    def attempt_id(self, rollout_id: str, number: int) -> str:
        return self.attempts.get((rollout_id, number), "at-none")

    def named(self, pairs: list[tuple[str, str]]) -> list[Any]:
        names = {attempt_id: key for key, attempt_id in self.attempts.items()}
        return sorted(str(names.get(attempt_id, rollout_id)) for rollout_id, attempt_id in pairs)

    async def play(self, step: Any) -> Any:
        try:
            return await self._play(step)
        except StoreError as error:
            return type(error).__name__

    async def _play(self, step: Any) -> Any:
        store = self.store
        match step:
            case "enqueue", rollout_id, config, priority:
                return (
                    await store.enqueue_rollout(1, rollout_id=rollout_id, config=config, priority=priority)
                ).status
            case "dequeue", limit, worker_id, claim_id:
                return self._keep(await store.dequeue_many_rollouts(limit, worker_id, claim_id=claim_id))
            case "start", rollout_id, worker_id:
                return self._keep([await store.start_attempt(rollout_id, worker_id)])
            case "report", rollout_id, number, status, worker_id, trajectory:
                attempt = await store.update_attempt(
                    rollout_id,
                    self.attempt_id(rollout_id, number),
                    status=status,
                    worker_id=worker_id,
                    trajectory=trajectory,
                )
                return attempt.status, attempt.worker_id, attempt.lease_expires, attempt.end_time
            case "finish", rollout_id, number, status, worker_id, claim_id:
                return self._keep(
                    await store.finish_and_dequeue(
                        rollout_id,
                        self.attempt_id(rollout_id, number),
                        status=status,
                        worker_id=worker_id,
                        claim_id=claim_id,
                    )
                )
            case "heartbeat", worker_id, named:
                pairs = (
                    None if named is None else [(name, self.attempt_id(name, each)) for name, each in named]
                )
                return self.named(await store.update_worker(worker_id, attempts=pairs))
            case "append", rollout_id, number, append_id:
                attempt_id = self.attempt_id(rollout_id, number)
                return await store.append_journal(rollout_id, attempt_id, [b"x"], append_id=append_id)
            case "clear", rollout_id, number:
                return await store.clear_journal(rollout_id, self.attempt_id(rollout_id, number))
            case "update", rollout_id, status, config:
                return (await store.update_rollout(rollout_id, status=status, config=config)).status
            case "cancel", wanted:
                return await store.cancel_rollouts(wanted, "enough")
            case "taken", worker_id:
                return self.named(await store.wait_for_cancellations(worker_id, timeout=0))
            case "release", wanted:
                return await store.release_trajectories(wanted)
            case "delete", wanted:
                return await store.delete_rollouts(wanted)
            case "retain", older_than:
                return await store.delete_finished(older_than=older_than)
        raise AssertionError(step)

    def _keep(self, claimed: Any) -> Any:
        for each in claimed:
            self.attempts[each.rollout_id, each.attempt.sequence_id] = each.attempt.attempt_id
        return [(each.rollout_id, each.attempt.sequence_id, each.attempt.lease_expires) for each in claimed]

    async def look(self) -> Any:
        """All that can be seen of the store."""
        rollouts = await self.store.query_rollouts(sort_by="rollout_id")
        names = [each.rollout_id for each in rollouts]
        attempts = [
            (each.rollout_id, each.sequence_id, each.status, each.worker_id, each.lease_expires, each.reason)
            for name in names
            for each in await self.store.query_attempts(name)
        ]
        workers = [
            (each.worker_id, each.status, each.last_heartbeat_time)
            for each in await self.store.query_workers()
        ]
        return (
            [(each.rollout_id, each.status, each.end_time, each.priority) for each in rollouts],
            attempts,
            workers,
            await self.store.statistics(),
            [await self.store.read_journal(name) for name in names],
            await self.store.get_trajectories(names, failed=True),
            [(each.cursor, each.rollout_id, each.status) for each in await self.store.read_completions()],
            [
                (each.time, each.kind, each.rollout_id, each.status, each.becomes)
                for each in await self.store.read_events()
            ],
        )


async def compare(steps: list[Any]) -> None:
    now = 1_000_000.0

    def clock() -> float:
        return now

    with tempfile.TemporaryDirectory() as folder:
        stores = [MemoryStore(clock=clock), await sqlite(Path(folder) / "store.db", clock)]
        players = [Player(store) for store in stores]
        for step in steps:
            if step[0] == "advance":
                now += step[1]
                continue
            in_memory, in_sqlite = [await player.play(step) for player in players]
            assert in_memory == in_sqlite, step
        in_memory, in_sqlite = [await player.look() for player in players]
        assert in_memory == in_sqlite
        for store in stores:
            assert complaints(await store.read_events(), await store.read_completions()) == []
            await store.close()


async def sqlite(path: Path, clock: Callable[[], float]) -> Store:
    return SqlStore(await SqliteDriver.open(path, clock))


@settings(max_examples=80, deadline=None)
@given(st.lists(steps, min_size=10, max_size=50))
def test_memory_and_sqlite_agree(steps: list[Any]) -> None:
    asyncio.run(compare(steps))
