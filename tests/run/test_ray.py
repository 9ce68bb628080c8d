"""Workers as Ray actors, on a real Ray: how many episodes each plays, and what becomes of them when one is lost."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from rollwright import RemoteRollout, RemoteRun
from rollwright.config import RunConfig, build
from rollwright.errors import ConfigError, RollwrightError
from rollwright.rollout import Activity, Batch
from rollwright.run import fleet as fleet_module
from rollwright.run.fleet import MOST_SHORT_LIVES, ScaleRules
from rollwright.run.folder import RunReader
from rollwright.run.run import Run
from rollwright.simulation.players import RandomPlayer
from rollwright.store.api import Store
from rollwright.store.invariants import complaints
from rollwright.store.memory import MemoryStore
from rollwright.store.opening import open_store
from rollwright.store.records import Attempt, AttemptStatus, EnqueueRequest

ray = pytest.importorskip("ray", reason="needs rollwright[ray]")
cluster_utils = pytest.importorskip("ray.cluster_utils")
ray_cluster = pytest.importorskip("rollwright.run.ray_fleet")
ray_fleet = pytest.importorskip("rollwright.run.ray_fleet")

GROUPS, GROUP_SIZE, MOST_ENVS = 6, 2, 3
ACTORS = GROUPS * GROUP_SIZE // MOST_ENVS
NOTICES_LATE = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 5,
}
"""Ray takes a node for dead after about 5 s: later than the leases end, sooner than the 15 s that are usual."""
PATIENCE = 60.0
"""Seconds after which something that was waited for will not come any more."""


def settings(**more: Any) -> dict[str, Any]:
    """Episodes of a second or two, and leases that end soon after a worker falls silent."""
    return {
        "name": "on-ray",
        "max_inflight": 100,
        "policy": {"slots": 64, "tokens_per_second": 100},
        "limits": {"lease_seconds": 2.0, "heartbeat_interval": 0.4, "max_attempts": 20},
        "train_env_manager": {
            "num_env_groups": GROUPS,
            "group_size": GROUP_SIZE,
            "tags": ["FrozenLake"],
            "max_env_num_per_worker": MOST_ENVS,
        },
        **more,
    }


def config(**more: Any) -> RunConfig:
    return build(settings(**more))


async def all_attempts(store: Store) -> list[Attempt]:
    rollouts = await store.query_rollouts()
    return [each for rollout in rollouts for each in await store.query_attempts(rollout.rollout_id)]


def most_at_once(attempts: list[Attempt]) -> dict[str, int]:
    """The most attempts that each worker ever held at the same time."""
    most: dict[str, int] = {}
    for at in attempts:
        name = str(at.worker_id)
        held = sum(
            each.worker_id == name and each.start_time <= at.start_time < (each.end_time or float("inf"))
            for each in attempts
        )
        most[name] = max(most.get(name, 0), held)
    return most


def check_delivered_once(batches: list[Batch]) -> None:
    delivered = [each.rollout_id for batch in batches for each in batch.trajectories]
    assert len(delivered) == len(set(delivered)) == len(batches) * GROUPS * GROUP_SIZE
    assert all(each.error is None for batch in batches for each in batch.trajectories)


async def check_history(store: Store) -> None:
    events = await store.read_events(limit=100_000)
    assert complaints(events, await store.read_completions(limit=100_000)) == []


@asynccontextmanager
async def taking_batches(run: Run) -> AsyncIterator[list[Batch]]:
    """Takes batch after batch inside the block, so that there is always something to play."""
    batches: list[Batch] = []

    async def take() -> None:
        while True:
            batches.append(await run.get_batch())

    taking = asyncio.create_task(take())
    try:
        yield batches
    finally:
        taking.cancel()
        with suppress(asyncio.CancelledError):
            await taking


async def has_batches(batches: list[Batch], number: int) -> bool:
    return len(batches) >= number


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    """What the condition gives, as soon as it gives something."""
    async with asyncio.timeout(PATIENCE):
        while not (found := await condition()):
            await asyncio.sleep(0.05)
    return found


async def attempts_of(run: Run, workers: Container[str], status: AttemptStatus) -> set[str]:
    attempts = await all_attempts(run.store)
    return {each.attempt_id for each in attempts if each.worker_id in workers and each.status is status}


async def actors_of(run: Run) -> dict[str, Any]:
    """Where the actors are, once all of them have taken a rollout."""
    fleet = run.workers.fleet
    assert isinstance(fleet, ray_fleet.RayFleet)

    async def all_busy() -> dict[str, Any] | None:
        busy = {each.worker_id for each in await all_attempts(run.store)}
        places: dict[str, Any] = fleet.locations
        return places if len(places) == ACTORS and places.keys() <= busy else None

    found: dict[str, Any] = await until(all_busy)
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One node; the tests add others."""
    head = {"num_cpus": 2, "include_dashboard": False, "_system_config": NOTICES_LATE}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    yield cluster
    cluster.shutdown()


def test_a_run_on_a_ray_of_its_own_spreads_its_environments_over_actors_and_keeps_quiet_B9(
    tmp_path: Path,
) -> None:
    (tmp_path / "ray.yaml").write_text(yaml.safe_dump(settings()), encoding="utf-8")
    words = [sys.executable, "-m", "rollwright", "run", "ray.yaml", "--ray", "local"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "raylet" not in done.stdout
    reader = RunReader(tmp_path / "runs" / "on-ray")
    assert len({each.rollout_id for each in reader.trajectories()}) == GROUPS * GROUP_SIZE

    async def attempts() -> list[Attempt]:
        store = await open_store(str(tmp_path / "runs" / "on-ray" / "store.db"))
        try:
            return await all_attempts(store)
        finally:
            await store.close()

    most = most_at_once(asyncio.run(attempts()))
    assert 2 <= len(most) <= ACTORS
    assert max(most.values()) <= MOST_ENVS


async def test_a_frozen_actor_loses_its_rollouts_and_its_late_results_count_for_nothing(
    cluster: Any, tmp_path: Path
) -> None:
    async with Run(config(), store=str(tmp_path / "store.db"), ray=cluster.address) as run:
        async with taking_batches(run) as batches:
            frozen, place = next(iter((await actors_of(run)).items()))
            os.kill(place.pid, signal.SIGSTOP)
            try:
                await until(lambda: attempts_of(run, {frozen}, AttemptStatus.UNRESPONSIVE))
                before = await attempts_of(run, {frozen}, AttemptStatus.SUCCEEDED)
            finally:
                os.kill(place.pid, signal.SIGCONT)

            async def works_again() -> bool:
                return before < await attempts_of(run, {frozen}, AttemptStatus.SUCCEEDED)

            await until(works_again)
            await until(lambda: has_batches(batches, 2))
        await check_history(run.store)
    check_delivered_once(batches)
    assert not ray.is_initialized()


async def test_a_node_that_is_killed_takes_no_rollout_with_it_and_its_actors_start_anew_elsewhere_B9(
    cluster: Any, tmp_path: Path
) -> None:
    doomed = cluster.add_node(num_cpus=2)
    async with Run(config(), store=str(tmp_path / "store.db"), ray=cluster.address) as run:
        async with taking_batches(run) as batches:
            places = await actors_of(run)
            there = {name for name, place in places.items() if place.node_id == doomed.node_id}
            assert 0 < len(there) < ACTORS
            await until(lambda: attempts_of(run, there, AttemptStatus.RUNNING))
            await asyncio.to_thread(cluster.remove_node, doomed, allow_graceful=False)
            await until(lambda: attempts_of(run, there, AttemptStatus.UNRESPONSIVE))

            async def new_ones() -> set[str]:
                return {each.worker_id or "" for each in await all_attempts(run.store)} - places.keys()

            new = await until(new_ones)
            await until(lambda: attempts_of(run, new, AttemptStatus.SUCCEEDED))
            now = run.workers.fleet.locations  # type: ignore[union-attr]
            assert {now[name].node_id for name in new} == {cluster.head_node.node_id}
            await until(lambda: has_batches(batches, 2))
        attempts = await all_attempts(run.store)
        await check_history(run.store)
    check_delivered_once(batches)
    assert max(most_at_once(attempts).values()) <= MOST_ENVS
    assert run.activity.dead_workers >= len(there)


async def test_remote_programs_play_what_actors_hold_also_after_one_is_killed(
    cluster: Any, tmp_path: Path
) -> None:
    """The cluster may have other nodes, so workers reach the run by the node's address, and programs by loopback."""
    rows = "".join(f'{{"question": "{n} + 1 = ?", "answer": {n + 1}}}\n' for n in range(16))
    (tmp_path / "sums.jsonl").write_text(rows, encoding="utf-8")
    agent = {"kind": "remote", "lease_seconds": 4.0}
    tag = {
        "tasks": "sums.jsonl",
        "agent": agent,
        "rewards": [{"kind": "exact_match", "extract": r"(\S+)\s*$"}],
    }
    settings_of_run = config(
        folder=str(tmp_path),
        policy={"kind": "simulated", "skill": 1.0, "tokens_per_second": 40, "mean_tokens": 10},
        custom_envs={"Sums": tag},
        remote={"port": 0},
        train_env_manager={
            "num_env_groups": GROUPS,
            "group_size": GROUP_SIZE,
            "tags": ["Sums"],
            "max_env_num_per_worker": MOST_ENVS,
        },
    )
    async with Run(settings_of_run, store=str(tmp_path / "store.db"), ray=cluster.address) as run:
        assert run.board is not None
        remote = RemoteRun(run.board.url, patience=1)
        threading.Thread(target=lambda: remote.play(ask, concurrency=6), daemon=True).start()
        async with taking_batches(run) as batches:
            lost, place = next(iter((await actors_of(run)).items()))
            await until(lambda: attempts_of(run, {lost}, AttemptStatus.RUNNING))
            os.kill(place.pid, signal.SIGKILL)
            await until(lambda: attempts_of(run, {lost}, AttemptStatus.UNRESPONSIVE))
            await until(lambda: has_batches(batches, 2))
        await check_history(run.store)
    check_delivered_once(batches)
    assert {each.reward for batch in batches for each in batch.trajectories} == {1.0}


def ask(task: dict[str, Any], session: RemoteRollout) -> str:
    with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        question: Any = {"role": "user", "content": task["question"]}
        return client.chat.completions.create(model="m", messages=[question]).choices[0].message.content or ""


async def test_actors_that_die_at_their_start_end_the_run_with_their_last_words(cluster: Any) -> None:
    store = MemoryStore()
    async with ray_cluster.RayCluster(cluster.address):
        fleet = ray_fleet.RayFleet(store, "ftp://store", ScaleRules(1, maximum=1), Activity())
        with pytest.raises(
            RollwrightError, match=f"{MOST_SHORT_LIVES} ray workers in a row .*unknown scheme 'ftp'"
        ):
            await asyncio.wait_for(fleet.run(), PATIENCE)
    await store.close()


async def test_actors_that_are_lost_at_their_start_end_the_run_with_what_ray_says(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doomed(ray_fleet.WorkerActor):  # type: ignore[misc, name-defined]
        async def work(self, *how: Any) -> None:
            os._exit(1)

    monkeypatch.setattr(ray_fleet, "WorkerActor", Doomed)
    monkeypatch.setattr(ray_fleet, "PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(fleet_module, "MOST_LOSSES", 3)
    store, activity = MemoryStore(), Activity()
    await store.enqueue_many_rollouts([EnqueueRequest(None) for _ in range(2)])
    async with ray_cluster.RayCluster(cluster.address):
        fleet = ray_fleet.RayFleet(store, "memory", ScaleRules(1, maximum=2), activity)
        with pytest.raises(RollwrightError, match="lost at their start 3 times in a row; the last time: "):
            await asyncio.wait_for(fleet.run(), PATIENCE)
    assert activity.dead_workers >= 3
    await store.close()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nonsense", "accepted are auto, local and HOST:PORT"),
        ("ray://host:10001", "start the run on one of its nodes"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused_before_anything_starts(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Run(config(), ray=address)


async def test_an_address_where_nothing_is_ends_the_run_with_one_line() -> None:
    with pytest.raises(ConfigError, match=r"ray: nothing answers at 127\.0\.0\.1:1"):
        async with Run(config(), ray="127.0.0.1:1"):
            pass


def test_a_policy_of_this_process_cannot_play_on_ray() -> None:
    with pytest.raises(ConfigError, match="policy: "):
        Run(config(), policy=RandomPlayer(), ray="local")


def test_without_ray_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "rollwright.run.ray_fleet")
    with pytest.raises(ConfigError, match=r"install rollwright\[ray\]"):
        Run(config(), ray="local")
