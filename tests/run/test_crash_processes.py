"""Kill any process of a run at any time: it finishes, or goes on, and nothing is lost, doubled or paid for twice."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollwright.rng import generator
from rollwright.run.folder import RunReader
from rollwright.simulation.server_process import RunningServer, simulated_server
from rollwright.trajectory import Trajectory, check, leaves, turn_weights

LATENCY = 0.08
"""Seconds of a generation: slow enough to be killed in the middle, fast enough for a test."""


@pytest.fixture
async def engine() -> AsyncIterator[RunningServer]:
    async with simulated_server(latency=LATENCY, latency_sigma=0.3) as server:
        yield server


def ask(lab: Any, engine: RunningServer) -> None:
    """A configuration that is played against this engine."""
    lab.config(policy={"kind": "openai", "base_url": engine.base_url, "model": "simulated"})


def turns(trajectories: list[Trajectory]) -> int:
    return sum(len(each.turns) for each in trajectories)


def wait_for_requests(lab: Any, engine: RunningServer, more: int) -> None:
    wanted = lab.requests(engine.stats_url) + more
    lab.until(lambda: lab.requests(engine.stats_url) >= wanted, f"{more} requests to the engine")


def test_a_worker_that_is_killed_costs_the_run_nothing_but_its_generations_in_flight(
    crash_lab: Any, engine: RunningServer
) -> None:
    ask(crash_lab, engine)
    run = crash_lab.start("run", "crash.yaml", "--workers", "2")
    crash_lab.until(lambda: len(crash_lab.workers_of(run)) == 2, "two workers")
    wait_for_requests(crash_lab, engine, 60)
    os.kill(crash_lab.workers_of(run)[0], signal.SIGKILL)
    crash_lab.finish(run)
    trajectories, story = crash_lab.check_whole()
    assert story.lost_attempts >= 1
    requests = crash_lab.requests(engine.stats_url)
    assert turns(trajectories) <= requests <= turns(trajectories) + story.lost_attempts
    summary = RunReader(crash_lab.run_folder).summary()
    assert summary is not None
    assert summary["activity"]["dead_workers"] == 1


@pytest.mark.parametrize("orphaned", [False, True], ids=["its_workers_too", "its_workers_end_by_themselves"])
def test_a_run_that_is_killed_goes_on_and_no_recorded_turn_is_generated_again(
    crash_lab: Any, engine: RunningServer, orphaned: bool
) -> None:
    ask(crash_lab, engine)
    run = crash_lab.start("run", "crash.yaml", "--workers", "2")
    crash_lab.until(lambda: len(crash_lab.workers_of(run)) == 2, "two workers")
    wait_for_requests(crash_lab, engine, 80)
    crash_lab.workers_of(run)
    run.kill()
    run.wait()
    if not orphaned:
        crash_lab.kill_workers()
    crash_lab.until(lambda: not crash_lab.living_workers, "the end of its workers")
    paid = crash_lab.settled_requests(engine.stats_url, quiet_seconds=LATENCY)
    recorded = crash_lab.story().recorded_turns
    crash_lab.do("resume", "runs/crash", "--workers", "2")
    trajectories, story = crash_lab.check_whole()
    requests = crash_lab.requests(engine.stats_url)
    assert requests - paid == turns(trajectories) - recorded
    assert requests <= turns(trajectories) + story.lost_attempts


def test_a_run_that_is_killed_again_and_again_still_ends_with_everything_once(
    crash_lab: Any, engine: RunningServer
) -> None:
    ask(crash_lab, engine)
    moments = generator("crash", 1)
    run = crash_lab.start("run", "crash.yaml")
    for _ in range(3):
        wait_for_requests(crash_lab, engine, moments.randrange(5, 50))
        time.sleep(moments.uniform(0, 2 * LATENCY))
        run.kill()
        run.wait()
        run = crash_lab.start("resume", "runs/crash")
    crash_lab.finish(run)
    trajectories, story = crash_lab.check_whole()
    requests = crash_lab.requests(engine.stats_url)
    assert turns(trajectories) <= requests <= turns(trajectories) + story.lost_attempts


SLOW = 1.0
"""Seconds of a generation: trees of five turns are half grown for long enough to be killed then, by a slow machine too."""


async def test_trees_that_are_killed_half_grown_grow_on_and_no_recorded_answer_is_generated_again(
    crash_lab: Any,
) -> None:
    manager = {"num_env_groups": 2, "group_size": 2, "tags": ["SimpleSokoban"]}
    async with simulated_server(latency=SLOW, latency_sigma=0.0) as engine:
        crash_lab.config(
            policy={"kind": "openai", "base_url": engine.base_url, "model": "simulated"},
            strategy={"kind": "tree", "width": 2, "depth": 2},
            custom_envs={"SimpleSokoban": {"max_steps": 5}},
            train_env_manager=manager,
            max_steps=1,
        )
        await asyncio.to_thread(killed_and_resumed, crash_lab, engine)


def killed_and_resumed(crash_lab: Any, engine: RunningServer) -> None:
    run = crash_lab.start("run", "crash.yaml")
    wait_for_requests(crash_lab, engine, 12)  # four trees: eight first answers, and some of the next level
    run.kill()
    run.wait()
    paid = crash_lab.settled_requests(engine.stats_url, quiet_seconds=SLOW)
    story = crash_lab.story()
    assert not story.completions, "it was over before it could be killed"
    assert story.recorded_turns > 0
    crash_lab.do("resume", "runs/crash")
    trees = list(RunReader(crash_lab.run_folder).trajectories())
    answers = sum(turn.count for tree in trees for turn in tree.turns)
    assert crash_lab.requests(engine.stats_url) - paid == answers - story.recorded_turns
    assert len(trees) == 4
    for tree in trees:
        weights = turn_weights(check(tree).turns)
        assert sum(weights[leaf] for leaf in leaves(tree.turns)) == pytest.approx(1)
    assert any(len(leaves(tree.turns)) > 1 for tree in trees)


def test_a_run_that_was_interrupted_ends_with_the_results_of_one_that_was_not(crash_lab: Any) -> None:
    crash_lab.config(policy={"slots": 8, "tokens_per_second": 800})
    crash_lab.do("run", "crash.yaml", "name=whole")
    run = crash_lab.start("run", "crash.yaml")
    metrics = crash_lab.run_folder / "metrics.jsonl"
    crash_lab.until(metrics.exists, "the first step")
    run.send_signal(signal.SIGINT)
    crash_lab.finish(run, code=130)
    assert len(RunReader(crash_lab.run_folder).metrics()) < 3, "it was over before it could be interrupted"
    crash_lab.do("resume", "runs/crash")
    trajectories, _ = crash_lab.check_whole()
    whole = RunReader(crash_lab.folder / "runs" / "whole")
    assert content(trajectories) == content(list(whole.trajectories()))
    again, before = RunReader(crash_lab.run_folder).summary(), whole.summary()
    assert again is not None
    assert before is not None
    assert again["results"] == before["results"]


def test_what_failed_before_a_crash_is_replaced_and_told_once(crash_lab: Any) -> None:
    limits = {"lease_seconds": 2.0, "heartbeat_interval": 0.4, "max_attempts": 1}
    crash_lab.config(policy={"slots": 4, "tokens_per_second": 800, "failure_rate": 0.03}, limits=limits)
    run = crash_lab.start("run", "crash.yaml")
    failures = crash_lab.run_folder / "failures.jsonl"
    crash_lab.until(failures.exists, "a failure")
    run.kill()
    run.wait()
    crash_lab.do("resume", "runs/crash")
    reader = RunReader(crash_lab.run_folder)
    failed = [row["rollout_id"] for row in reader.failures()]
    assert len(failed) == len(set(failed)) > 0
    played = [each.rollout_id for each in reader.trajectories()]
    assert len(played) == len(set(played))
    assert not set(played) & set(failed)
    assert [row["trajectories"] for row in reader.metrics()] == [16] * 3


def content(trajectories: list[Trajectory]) -> dict[str, Any]:
    """What was played, by group and member; without the names of the run and of the attempts."""
    return {
        each.rollout_id.partition(".")[2]: [
            (turn.sampled_ids, turn.logprobs, turn.outcome) for turn in each.turns
        ]
        for each in trajectories
    }
