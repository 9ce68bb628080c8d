"""The vLLM client against a real server process: exact ids, failures, weight updates, a killed engine."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollwright.engines.base import (
    EngineError,
    Generation,
    Probed,
    Prompt,
    Sampling,
    Updatable,
    UpdateMode,
    Weights,
)
from rollwright.engines.pool import SILENCE_SECONDS
from rollwright.engines.rendering.bytes import END, VOCABULARY_SIZE, BytesRenderer
from rollwright.engines.settings import EngineServersConfig
from rollwright.engines.vllm import VllmPolicy
from rollwright.errors import ConfigError
from rollwright.http.retry import FaultCause, RetryPolicy
from rollwright.simulation.server_process import RunningServer, simulated_server
from rollwright.simulation.vllm import logprob_of
from rollwright.trajectory import FinishReason, Message, expand_versions

FAST = RetryPolicy(max_retries=40, first=0.002, factor=1.2, longest=0.02)
RENDERER = BytesRenderer()
FOLDER = Path("new-weights")
"""The simulated server takes any."""


def prompt(place: int, episode: str | None = None) -> Prompt:
    ids = RENDERER.open([Message("user", f"go {place}")])
    return Prompt(episode=episode or f"e{place}", key=("run", place), messages=(), ids=ids)


@asynccontextmanager
async def opened(*servers: RunningServer, **options: Any) -> AsyncIterator[VllmPolicy]:
    names = ("api_key", "extra_body", "retry", "version")
    given = {name: options.pop(name) for name in names if name in options}
    urls = [server.base_url for server in servers]
    settings = EngineServersConfig(base_urls=urls, **{"vocabulary_size": VOCABULARY_SIZE, **options})
    policy = VllmPolicy(settings, "simulated", RENDERER, **{"retry": FAST, **given})
    try:
        yield policy
    finally:
        await policy.close()


async def generate_many(policy: VllmPolicy, count: int, sampling: Sampling | None = None) -> list[Generation]:
    return await asyncio.gather(
        *(policy.generate(prompt(place), sampling or Sampling()) for place in range(count))
    )


def assert_right(made: Generation) -> None:
    """Whole, and every token's stamp is of the weights that its log-probability tells of."""
    assert made.exact
    assert made.sampled_ids
    assert len(made.logprobs) == len(made.sampled_ids) == made.completion_tokens
    assert made.logprobs.tolist() == [logprob_of(version) for version in expand_versions(made.versions)]
    assert made.text == RENDERER.decode(made.sampled_ids)
    if made.finish is FinishReason.STOP:
        assert made.sampled_ids[-1] == END
        assert made.text.endswith("</answer>")


async def test_ids_logprobs_and_stop_token_come_back_as_sampled() -> None:
    async with simulated_server(actions=("Up",)) as server, opened(server) as policy:
        made = await policy.generate(prompt(1), Sampling())
        assert made.sampled_ids == RENDERER.encode("<answer>Up</answer>")
        assert_right(made)
        cut = await policy.generate(prompt(1), Sampling(max_tokens=5))
        assert (cut.text, cut.finish) == ("<answ", FinishReason.LENGTH)
        assert isinstance(policy, Updatable)
        assert isinstance(policy, Probed)


async def test_a_probe_tells_what_the_engine_can_do() -> None:
    async with simulated_server() as server, opened(server) as policy:
        found = await policy.probe()
        assert (found.engine, found.model, found.missing) == ("vLLM simulated", "simulated", "")
        assert found.trainable
        assert found.update_modes == tuple(UpdateMode)
        with pytest.raises(ConfigError, match="serves simulated, not 'other'"):
            await VllmPolicy(server.base_url, "other", RENDERER).probe()


async def test_raw_logprobs_are_exact_only_where_they_are_those_of_the_sampled_distribution() -> None:
    async with simulated_server(raw_logprobs=True) as server, opened(server) as policy:
        assert "processed_logprobs" in (await policy.probe()).missing
        for sampling, exact in (
            (Sampling(), True),
            (Sampling(temperature=0.0), True),
            (Sampling(temperature=0.5), False),
            (Sampling(top_p=0.9), False),
        ):
            assert (await policy.generate(prompt(1), sampling)).exact is exact
        assert policy.counters.not_exact == 2
    async with simulated_server() as server, opened(server) as policy:
        assert (await policy.generate(prompt(1), Sampling(temperature=0.5, top_p=0.9))).exact


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("rate_limit", FaultCause.RATE_LIMITED),
        ("truncate", FaultCause.BROKEN_BODY),
        ("wrong_logprobs", FaultCause.BROKEN_BODY),
        ("error", FaultCause.SERVER_ERROR),
        ("drop", FaultCause.CONNECTION),
    ],
)
async def test_every_failure_is_retried_and_counted_by_cause(fault: str, cause: FaultCause) -> None:
    async with (
        simulated_server(**{f"{fault}_rate": 0.4, "retry_after": 0.01}) as server,
        opened(server) as policy,
    ):
        for made in await generate_many(policy, 60):
            assert_right(made)
        assert set(policy.counters.retries) == {cause}
        assert not policy.counters.failures


async def test_an_engine_that_never_answers_is_given_up_in_one_line() -> None:
    retry = RetryPolicy(max_retries=1, first=0.01)
    async with (
        simulated_server(hang_rate=1) as server,
        opened(server, request_timeout=0.1, retry=retry) as policy,
    ):
        with pytest.raises(EngineError, match=r"no answer within 0\.1 s \(after 2 tries\)") as error:
            await policy.generate(prompt(1), Sampling())
        assert len(str(error.value).splitlines()) == 1
        assert policy.counters.failures == {FaultCause.TIMEOUT: 1}


@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_new_weights_while_calls_run_leave_every_token_with_its_own_version(mode: UpdateMode) -> None:
    async with (
        simulated_server(latency=0.3, latency_sigma=0.3, filler=300, slots=6) as server,
        opened(server) as policy,
    ):

        async def play(place: int) -> list[Generation]:
            return [await policy.generate(prompt(place), Sampling(max_tokens=10_000)) for _ in range(3)]

        episodes = [asyncio.create_task(play(place)) for place in range(8)]
        for version in (1, 2, 3):
            await asyncio.sleep(0.12)
            await policy.update_weights(Weights(version, FOLDER), mode)
            assert policy.version == version
        made = [each for episode in await asyncio.gather(*episodes) for each in episode]
        for each in made:
            assert_right(each)
        runs = [len(each.versions) for each in made]
        counters = policy.counters
        assert counters.updates == 3
        if mode is UpdateMode.ABORT_AND_RESUME:
            assert max(runs) > 1
            assert counters.resumed_calls > 0
        else:
            assert max(runs) == 1
        assert (
            (counters.restarted_calls > 0)
            == (counters.discarded_tokens > 0)
            == (mode is UpdateMode.RESTART_TURN)
        )
        assert max(run.version for each in made for run in each.versions) > 0


async def test_an_update_that_fails_changes_no_version_and_says_why() -> None:
    async with (
        simulated_server() as server,
        opened(server, outage_patience=0.2, retry=RetryPolicy(0)) as policy,
    ):
        with pytest.raises(ConfigError, match="loads a folder"):
            await policy.update_weights(Weights(1, tensors={}), UpdateMode.DRAIN)
        with pytest.raises(EngineError, match=r"HTTP 400.*no such folder"):
            await policy.update_weights(Weights(1, Path("missing")), UpdateMode.DRAIN)
        assert policy.version == 0
        with pytest.raises(EngineError, match=r"no engine in service for 0\.2 s.*no such folder"):
            await policy.generate(prompt(1), Sampling())  # its weights may be anything now
        await policy.update_weights(Weights(1, FOLDER), UpdateMode.DRAIN)
        assert_right(await policy.generate(prompt(1), Sampling()))


async def test_a_folder_that_is_not_as_announced_is_never_loaded(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"half a file")
    async with simulated_server() as server, opened(server) as policy:
        with pytest.raises(EngineError, match="has checksum"):
            await policy.update_weights(Weights(1, tmp_path, checksum="0" * 64), UpdateMode.DRAIN)
        assert_right(await policy.generate(prompt(1), Sampling()))


async def test_a_call_that_is_cancelled_during_an_update_ends_and_the_update_too() -> None:
    async with simulated_server(latency=0.5, latency_sigma=0, filler=50) as server, opened(server) as policy:
        call = asyncio.create_task(policy.generate(prompt(1), Sampling(max_tokens=500)))
        await asyncio.sleep(0.1)
        update = asyncio.create_task(policy.update_weights(Weights(1, FOLDER), UpdateMode.DRAIN))
        await asyncio.sleep(0.05)
        call.cancel()
        async with asyncio.timeout(5):
            await update
            with pytest.raises(asyncio.CancelledError):
                await call
        assert_right(await policy.generate(prompt(2), Sampling(max_tokens=500)))


async def test_an_engine_that_is_killed_gets_the_present_weights_before_its_next_call() -> None:
    async with opened_twice() as (policy, first, port):
        await policy.update_weights(Weights(1, FOLDER), UpdateMode.DRAIN)
        calls = [
            asyncio.create_task(policy.generate(prompt(place), Sampling(max_tokens=500)))
            for place in range(8)
        ]
        await asyncio.sleep(0.05)
        os.kill(first.pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
        async with simulated_server(port=port, latency=0.1):
            async with asyncio.timeout(20):
                made = await asyncio.gather(*calls)
            for each in made:
                assert each.versions[0].version == 1
                assert_right(
                    each
                )  # a restarted engine that was not brought up to date has other log-probabilities
        assert policy.counters.retries[FaultCause.CONNECTION] > 0


@asynccontextmanager
async def opened_twice() -> AsyncIterator[tuple[VllmPolicy, RunningServer, int]]:
    """A policy and a server that may be killed; another one can take its port."""
    async with simulated_server(latency=0.3, latency_sigma=0) as server, opened(server) as policy:
        yield policy, server, server.port


async def test_episodes_stay_with_their_engine_and_survive_the_loss_of_one() -> None:
    async with (
        simulated_server(latency=0.02) as one,
        simulated_server(latency=0.02) as two,
        opened(one, two) as policy,
    ):
        for _ in range(3):
            await generate_many(policy, 20)
        router = policy._pool.router
        assert router.moved == 0
        os.kill(one.pid, signal.SIGKILL)
        for made in await generate_many(policy, 20):
            assert_right(made)
        assert router.serving == [1]
        assert router.moved == 10
        async with simulated_server(port=one.port), asyncio.timeout(20):
            while router.serving != [0, 1]:
                await asyncio.sleep(0.02)
            assert_right(await policy.generate(prompt(99), Sampling()))


async def test_wrong_settings_are_refused_in_one_line() -> None:
    async with simulated_server() as server:
        with pytest.raises(ConfigError, match="the same address is given twice"):
            VllmPolicy(EngineServersConfig(base_urls=[server.base_url] * 2), "m", RENDERER)
    with pytest.raises(ConfigError, match="base_urls: 'nonsense' is not a URL"):
        VllmPolicy("nonsense", "m", RENDERER)
    with pytest.raises(ConfigError, match=r"extra_body\.prompt: cannot be set here"):
        VllmPolicy("http://host", "m", RENDERER, extra_body={"prompt": []})


async def test_an_engine_restarted_between_two_calls_is_noticed_though_no_call_failed() -> None:
    async with opened_twice() as (policy, first, port):
        await policy.update_weights(Weights(1, FOLDER), UpdateMode.DRAIN)
        assert_right(await policy.generate(prompt(1), Sampling(max_tokens=500)))
        os.kill(first.pid, signal.SIGKILL)
        async with simulated_server(port=port):
            await asyncio.sleep(1.1 * SILENCE_SECONDS)
            assert_right(await policy.generate(prompt(2), Sampling(max_tokens=500)))
        assert not policy.counters.retries
        assert policy.counters.outages == 1
