"""A whole run in one process: workers, validation, and what happens when something breaks."""

import asyncio
from typing import Any, ClassVar

import pytest

from rollwright.aio import run_virtual
from rollwright.config import RunConfig, build
from rollwright.engines.base import Generation, Prompt, Sampling
from rollwright.errors import ConfigError
from rollwright.rollout import Batch
from rollwright.run.run import Run
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.lengths import LogNormalLength
from rollwright.simulation.players import OraclePlayer, RandomPlayer
from rollwright.store.backend import handles
from rollwright.store.calls import DequeueManyRollouts
from rollwright.store.memory import MemoryStore

TAGS = ["FrozenLake", "SimpleSokoban"]


def config(**more: Any) -> RunConfig:
    return build(
        {
            "name": "test",
            "train_env_manager": {
                "num_env_groups": 6,
                "group_size": 4,
                "tags": TAGS,
                "max_env_num_per_worker": 5,
            },
            "val_env_manager": {"num_env_groups": 10, "tags": TAGS},
            **more,
        }
    )


def engine(**more: Any) -> SimulatedEngine:
    return SimulatedEngine(slots=16, tokens_per_second=40, lengths=LogNormalLength(30, 0.8), **more)


def content(batch: Batch) -> list[Any]:
    return [(each.tag, each.seed, [turn.sampled_ids for turn in each.turns]) for each in batch.trajectories]


class Watcher(RandomPlayer):
    """Remembers the temperatures it was asked with."""

    seen: ClassVar[set[float]] = set()

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        self.seen.add(sampling.temperature)
        return await super().generate(prompt, sampling)


def test_validation_is_greedy_on_the_same_levels_every_time_B10() -> None:
    policy = Watcher()
    policy.seen.clear()

    async def run() -> tuple[Any, Any]:
        async with Run(config(train_env_manager=None), policy=policy) as it:
            return content(await it.evaluate(0)), content(await it.evaluate(1))

    first, second = asyncio.run(run())
    assert first == second
    assert len({seed for _, seed, _ in first}) == 10
    assert policy.seen == {0.0}


def test_validation_beside_training_changes_nothing_of_it_B10() -> None:
    async def run(validate: bool) -> list[Any]:
        async with Run(config(), policy=engine()) as it:
            beside = asyncio.create_task(it.evaluate(0)) if validate else None
            batches = [content(await it.get_batch()) for _ in range(2)]
            if beside is not None:
                assert len((await beside).trajectories) == 10
            return batches

    assert run_virtual(run(True)) == run_virtual(run(False))


def test_training_and_validation_never_share_a_level() -> None:
    async def run() -> tuple[set[int], set[int]]:
        async with Run(config(), policy=OraclePlayer()) as it:
            train, val = await it.get_batch(), await it.evaluate(0)
            return {each.seed for each in train.trajectories}, {each.seed for each in val.trajectories}

    train, val = asyncio.run(run())
    assert not train & val


def test_no_worker_runs_more_environments_than_it_may_B9() -> None:
    async def run() -> dict[str, int]:
        store = MemoryStore()
        async with Run(config(max_inflight=100), policy=engine(), store=store) as it:
            await it.get_batch()
            attempts = [await store.get_latest_attempt(r.rollout_id) for r in await store.query_rollouts()]
            overlapping: dict[str, int] = {}
            for worker in {a.worker_id for a in attempts if a is not None and a.worker_id}:
                mine = [a for a in attempts if a is not None and a.worker_id == worker]
                moments = [a.start_time for a in mine]
                most = max(
                    sum(a.start_time <= now < (a.end_time or float("inf")) for a in mine) for now in moments
                )
                overlapping[worker] = most
            return overlapping

    overlapping = run_virtual(run())
    assert len(overlapping) >= 5
    assert max(overlapping.values()) <= 5


def test_the_environments_played_follow_the_partition_B5() -> None:
    async def run() -> list[str]:
        manager = {"num_env_groups": 8, "group_size": 2, "tags": TAGS, "num_groups_partition": [6, 2]}
        async with Run(config(train_env_manager=manager), policy=OraclePlayer()) as it:
            return [group.tag for group in (await it.get_batch()).groups]

    tags = asyncio.run(run())
    assert (tags.count("FrozenLake"), tags.count("SimpleSokoban")) == (6, 2)


def test_an_engine_with_failures_hangs_and_rate_limits_still_gives_whole_batches() -> None:
    async def run() -> tuple[Batch, Run]:
        broken = engine(failure_rate=0.05, hang_rate=0.02, max_queue=4)
        limits = {"generate_timeout": 60, "max_attempts": 8}
        async with Run(config(limits=limits), policy=broken) as it:
            return await it.get_batch(), it

    batch, it = run_virtual(run())
    assert len(batch.trajectories) == 24
    assert {"engine: EngineError", "engine: timeout", "engine: RateLimited"} >= set(it.activity.failures)
    assert sum(it.activity.failures.values()) > 0
    assert all(each.error is None for each in batch.trajectories)


def test_the_limit_on_episodes_in_flight_is_kept() -> None:
    async def run() -> int:
        most = 0
        async with Run(config(max_inflight=3), policy=engine()) as it:
            batch = asyncio.create_task(it.get_batch())
            while not batch.done():
                most = max(most, it.activity.inflight)
                await asyncio.sleep(0.05)
        return most

    assert run_virtual(run()) == 3


def test_an_error_of_the_store_ends_the_wait_with_that_error() -> None:
    class Broken(MemoryStore):
        @handles(DequeueManyRollouts)
        async def _dequeue_many_rollouts(self, call: DequeueManyRollouts) -> Any:
            raise OSError("the disk is gone")

    async def run() -> None:
        async with Run(config(), policy=OraclePlayer(), store=Broken()) as it:
            await it.get_batch()

    with pytest.raises(OSError, match="the disk is gone"):
        asyncio.run(run())


def test_asking_for_what_the_configuration_does_not_have_is_refused() -> None:
    async def run() -> None:
        async with Run(config(train_env_manager=None), policy=OraclePlayer()) as it:
            await it.get_batch()

    with pytest.raises(ConfigError, match="train_env_manager: is not set"):
        asyncio.run(run())


def test_raising_a_tags_action_limit_reaches_the_environment() -> None:
    async def run() -> int:
        custom = {"FrozenLake": {"max_steps": 15, "env_config": {"is_slippery": True}}}
        async with Run(config(custom_envs=custom), policy=RandomPlayer()) as it:
            batch = await it.get_batch(96)
            return max(len(each.turns) for each in batch.trajectories if each.tag == "FrozenLake")

    assert 10 < asyncio.run(run()) <= 15
