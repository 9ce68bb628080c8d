"""Whole runs against a server that misbehaves in every way: they finish, and nothing wrong is recorded."""

import asyncio
import os
import signal
from pathlib import Path

from rollwright.config import RunConfig, build
from rollwright.engines.base import UpdateMode, Weights
from rollwright.engines.rendering.bytes import VOCABULARY_SIZE, BytesRenderer
from rollwright.engines.settings import EngineServersConfig
from rollwright.engines.vllm import VllmPolicy
from rollwright.http.retry import FaultCause, RetryPolicy
from rollwright.rollout import Batch
from rollwright.run.run import Run
from rollwright.simulation.server_process import simulated_server
from rollwright.simulation.vllm import logprob_of
from rollwright.trajectory import expand_versions, samples

FAST = RetryPolicy(max_retries=40, first=0.002, factor=1.3, longest=0.05)
GROUPS, SIZE = 4, 4

EVERY_FAULT = set(FaultCause) - {FaultCause.REFUSED}
"""What the simulated server can be told to do to a call."""

MOST_BATCHES = 20
"""Faults are drawn; in so many batches, each of some sixty calls, even the rarest kind has come up."""


def config() -> RunConfig:
    manager = {"num_env_groups": GROUPS, "group_size": SIZE, "tags": ["FrozenLake"]}
    return build({"name": "test", "async_generation_ratio": 8, "train_env_manager": manager})


def engine(*urls: str, request_timeout: float = 30.0) -> VllmPolicy:
    return VllmPolicy(
        EngineServersConfig(
            base_urls=list(urls), request_timeout=request_timeout, vocabulary_size=VOCABULARY_SIZE
        ),
        "simulated",
        BytesRenderer(),
        retry=FAST,
    )


def assert_right(batch: Batch) -> None:
    """Every trajectory is trainable, and each token's stamp is of the weights that made it."""
    assert len(batch.trajectories) == GROUPS * SIZE
    for trajectory in batch.trajectories:
        assert trajectory.not_trainable is None
        for turn in trajectory.turns:
            assert turn.logprobs.tolist() == [logprob_of(each) for each in expand_versions(turn.versions)]
        (sample,) = samples(trajectory)  # one unbroken sequence
        assert sum(sample.mask) == trajectory.sampled_tokens


async def test_a_run_finishes_whatever_the_engine_does_and_the_counts_say_what_it_did() -> None:
    faults = ("rate_limit", "truncate", "wrong_logprobs", "drop", "error")
    async with simulated_server(
        **{f"{fault}_rate": 0.06 for fault in faults}, hang_rate=0.03, retry_after=0.01, latency=0.005
    ) as server:
        policy = engine(server.base_url, request_timeout=0.4)
        async with Run(config(), policy=policy) as run:
            for _ in range(MOST_BATCHES):
                assert_right(await run.get_batch())
                if set(policy.counters.retries) == EVERY_FAULT:
                    break
        assert set(policy.counters.retries) == EVERY_FAULT
        assert not policy.counters.failures


async def test_a_run_survives_an_engine_that_is_killed_and_restarted_and_updated() -> None:
    async with simulated_server(latency=0.02, filler=40) as first:
        policy = engine(first.base_url)
        async with Run(config(), policy=policy) as run:
            assert_right(await run.get_batch())
            await policy.update_weights(Weights(1, Path("folder")), UpdateMode.ABORT_AND_RESUME)
            os.kill(first.pid, signal.SIGKILL)
            await asyncio.sleep(0.1)
            async with simulated_server(port=first.port, latency=0.02, filler=40):
                second = await run.get_batch()
                assert_right(second)
                await policy.update_weights(Weights(2, Path("folder")), UpdateMode.RESTART_TURN)
                stamped = {
                    run.version
                    for each in second.trajectories
                    for turn in each.turns
                    for run in turn.versions
                }
                assert 1 in stamped
        assert policy.counters.retries[FaultCause.CONNECTION] > 0
        assert not policy.counters.failures
