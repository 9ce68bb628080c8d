"""The HTTP client against real servers: every failure is retried or told in one line, and counted."""

import asyncio
import gc
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rollwright.config import build
from rollwright.engines import EngineError, Generation, Prompt, RateLimited, Sampling
from rollwright.engines.openai import OpenAIPolicy
from rollwright.engines.settings import OpenAIPolicyConfig
from rollwright.errors import ConfigError
from rollwright.http.retry import FaultCause, RetryPolicy
from rollwright.simulation.server_process import RunningServer, simulated_server
from rollwright.trajectory import FinishReason, Message

FAST = RetryPolicy(max_retries=40, first=0.002, factor=1.2, longest=0.02)
COMPLETION = {
    "choices": [{"message": {"content": "<answer>Up</answer>"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 11, "completion_tokens": 7},
}


def prompt(*key: str | int) -> Prompt:
    return Prompt(episode="e", key=key, messages=[Message("user", "go")])


def now() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def opened(base_url: str, **options: Any) -> AsyncIterator[OpenAIPolicy]:
    given = {name: options.pop(name) for name in ("api_key", "retry", "version") if name in options}
    settings = OpenAIPolicyConfig(base_url=base_url, model="m", **options)
    policy = OpenAIPolicy(settings, **{"retry": FAST, **given})
    try:
        yield policy
    finally:
        await policy.close()


async def stats(server: RunningServer) -> Any:
    async with aiohttp.ClientSession() as session, session.get(server.stats_url) as response:
        return await response.json()


async def generate_many(policy: OpenAIPolicy, count: int) -> list[Generation]:
    return await asyncio.gather(*(policy.generate(prompt(place), Sampling()) for place in range(count)))


class Scripted:
    """A real HTTP server that gives these answers one after the other, and the last one for ever."""

    def __init__(self, *answers: tuple[int, Any, dict[str, str]]) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.hangs: set[int] = set()
        """The numbers of the requests, from 1, that are never answered."""
        self.at_once = self.most_at_once = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append((dict(request.headers), await request.json()))
        if len(self.requests) in self.hangs:
            await asyncio.get_running_loop().create_future()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.005)
        self.at_once -= 1
        status, body, headers = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(body, str):
            return web.Response(status=status, text=body, headers=headers)
        return web.json_response(body, status=status, headers=headers)


@asynccontextmanager
async def served(script: Scripted) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", script.answer)
    app.router.add_post("/v1/completions", script.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_a_completion_comes_back_as_text_that_is_not_exact(api: Any) -> None:
    async with (
        simulated_server(filler=10, actions=("Up",)) as server,
        opened(server.base_url, api=api) as policy,
    ):
        made = await policy.generate(prompt("k"), Sampling())
        assert made.text.endswith("<answer>Up</answer>")
        assert (made.exact, made.finish, policy.renderer) == (False, FinishReason.STOP, None)
        assert made.completion_tokens == len(made.text)
        cut = await policy.generate(prompt("k"), Sampling(max_tokens=4))
        assert (cut.text, cut.finish) == (made.text[:4], FinishReason.LENGTH)
        assert policy.counters.requests == 2
        assert policy.counters.completion_tokens == made.completion_tokens + 4
        assert policy.counters.prompt_tokens == 2 * made.prompt_tokens


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("rate_limit", FaultCause.RATE_LIMITED),
        ("error", FaultCause.SERVER_ERROR),
        ("truncate", FaultCause.BROKEN_BODY),
        ("drop", FaultCause.CONNECTION),
    ],
)
async def test_passing_failures_are_retried_until_every_call_has_its_completion(
    fault: str, cause: FaultCause
) -> None:
    async with simulated_server(**{f"{fault}_rate": 0.4, "retry_after": 0.01}) as server:
        async with opened(server.base_url) as policy:
            made = await generate_many(policy, 60)
            assert all("<answer>" in each.text for each in made)
        told = await stats(server)
    assert told["outcomes"]["answer"] == 60
    assert told["outcomes"][fault] > 10
    assert policy.counters.retries == {cause: told["outcomes"][fault]}
    assert policy.pressure == (told["outcomes"][fault] if cause is FaultCause.RATE_LIMITED else 0)
    assert not policy.counters.failures


async def test_requests_that_hang_are_given_up_and_retried() -> None:
    async with simulated_server(hang_rate=0.25) as server:
        async with opened(server.base_url, request_timeout=0.5) as policy:
            assert all("<answer>" in each.text for each in await generate_many(policy, 40))
        hung = (await stats(server))["outcomes"]["hang"]
    assert hung > 4
    assert policy.pressure == policy.counters.retries[FaultCause.TIMEOUT] >= hung


async def test_a_storm_of_everything_at_once_is_survived() -> None:
    rates = {f"{fault}_rate": 0.1 for fault in ("rate_limit", "error", "truncate", "drop", "hang")}
    async with (
        simulated_server(**rates, retry_after=0.01, latency=0.005, slots=32) as server,
        opened(server.base_url, request_timeout=0.5) as policy,
    ):
        assert len(await generate_many(policy, 200)) == 200
        assert set(policy.counters.retries) == set(FaultCause) - {FaultCause.REFUSED}


async def test_a_retry_waits_as_long_as_the_server_asks() -> None:
    script = Scripted((429, {}, {"Retry-After": "0.3"}), (200, COMPLETION, {}))
    async with served(script) as url, opened(url, retry=RetryPolicy(5, first=0.001, longest=10)) as policy:
        start = now()
        await policy.generate(prompt("k"), Sampling())
        assert now() - start >= 0.3


async def test_a_date_in_retry_after_is_understood() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    script = Scripted((503, {}, {"Retry-After": later}), (200, COMPLETION, {}))
    async with served(script) as url, opened(url, retry=RetryPolicy(5, first=0.001, longest=10)) as policy:
        start = now()
        await policy.generate(prompt("k"), Sampling())
        assert now() - start >= 0.8  # a date has whole seconds: of the 2 s up to one is rounded away


async def test_no_server_can_make_a_call_wait_for_ever() -> None:
    script = Scripted((429, {}, {"Retry-After": "86400"}), (200, COMPLETION, {}))
    async with served(script) as url, opened(url, retry=RetryPolicy(5, first=0.001, longest=0.05)) as policy:
        async with asyncio.timeout(30):
            made = await policy.generate(prompt("k"), Sampling())
        assert made.finish == "stop"
        assert len(script.requests) == 2
        assert policy.counters.retries.total() == 1


async def test_a_refusal_is_not_retried_and_shows_the_servers_words() -> None:
    script = Scripted((400, {"error": {"message": "max_tokens is too large:\n 99999"}}, {}))
    async with served(script) as url, opened(url) as policy:
        with pytest.raises(EngineError) as failure:
            await policy.generate(prompt("k"), Sampling())
        assert str(failure.value) == (
            f"{url}/chat/completions: HTTP 400: max_tokens is too large: 99999 (after 1 try)"
        )
        assert len(script.requests) == 1
        assert policy.counters.failures == {FaultCause.REFUSED: 1}


async def test_a_redirect_is_not_followed_with_the_key_in_hand() -> None:
    script = Scripted((307, "", {"Location": "http://127.0.0.1:9/elsewhere"}))
    async with served(script) as url, opened(url, api_key="s3cret") as policy:
        with pytest.raises(EngineError, match="HTTP 307: Temporary Redirect"):
            await policy.generate(prompt("k"), Sampling())


async def test_when_retries_are_used_up_the_error_says_where_how_often_and_why() -> None:
    script = Scripted((502, "<html>\n<h1>Bad Gateway</h1></html>", {}))
    retry = RetryPolicy(max_retries=2, first=0.001, longest=0.01)
    async with served(script) as url, opened(url, retry=retry) as policy:
        with pytest.raises(EngineError) as failure:
            await policy.generate(prompt("k"), Sampling())
        assert str(failure.value) == (
            f"{url}/chat/completions: HTTP 502: <html> <h1>Bad Gateway</h1></html> (after 3 tries)"
        )
        assert len(script.requests) == 3
        assert policy.counters.retries == {FaultCause.SERVER_ERROR: 2}
        assert policy.counters.failures == {FaultCause.SERVER_ERROR: 1}


async def test_a_lasting_rate_limit_is_told_as_one() -> None:
    script = Scripted((429, {"message": "slow down"}, {"Retry-After": "0.01"}))
    options = {"retry": RetryPolicy(max_retries=1, first=0.001), "rate_limit_patience": 0.05}
    async with served(script) as url, opened(url, **options) as policy:
        with pytest.raises(RateLimited, match=r"HTTP 429: slow down \(after \d+ tries\)") as failure:
            await policy.generate(prompt("k"), Sampling())
        assert failure.value.retry_after == 0.01


async def test_an_engine_that_is_down_is_told_in_one_line() -> None:
    retry = RetryPolicy(max_retries=2, first=0.001, longest=0.01)
    async with opened("http://127.0.0.1:9/v1", retry=retry) as policy:
        with pytest.raises(EngineError) as failure:
            await policy.generate(prompt("k"), Sampling())
    message = str(failure.value)
    assert message.startswith("http://127.0.0.1:9/v1/chat/completions: Cannot connect to host 127.0.0.1:9")
    assert message.endswith("(after 3 tries)")
    assert len(message.splitlines()) == 1


async def test_an_engine_that_hangs_is_told_with_the_time_limit() -> None:
    async with simulated_server(hang_rate=1) as server:
        retry = RetryPolicy(max_retries=1, first=0.001)
        async with opened(server.base_url, retry=retry, request_timeout=0.1) as policy:
            with pytest.raises(EngineError, match=r"no answer within 0\.1 s \(after 2 tries\)"):
                await policy.generate(prompt("k"), Sampling())


async def test_a_completion_without_its_fields_is_told_with_what_came_instead() -> None:
    script = Scripted((200, {"error": {"message": "model is loading"}}, {}))
    async with served(script) as url, opened(url, retry=RetryPolicy(max_retries=0)) as policy:
        with pytest.raises(EngineError, match=r"not a completion: .*choices.*: model is loading"):
            await policy.generate(prompt("k"), Sampling())


async def test_the_request_carries_key_model_and_extra_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_ENGINE_KEY", "s3cret\n")
    script = Scripted((200, COMPLETION, {}))
    async with served(script) as url:
        async with opened(url, api_key_env="MY_ENGINE_KEY", extra_body={"min_p": 0.05}) as policy:
            await policy.generate(prompt("k"), Sampling(temperature=0.3))
        async with opened(url) as policy:
            await policy.generate(prompt("k"), Sampling())
    (headers, body), (bare_headers, _) = script.requests
    assert headers["Authorization"] == "Bearer s3cret"
    assert headers["Content-Type"] == "application/json"
    assert (body["model"], body["min_p"], body["temperature"]) == ("m", 0.05, 0.3)
    assert "Authorization" not in bare_headers


async def test_a_cancelled_call_frees_its_connection() -> None:
    script = Scripted((200, COMPLETION, {}))
    async with served(script) as url, opened(url, max_connections=1) as policy:
        script.hangs.add(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await policy.generate(prompt("hangs"), Sampling())
        assert len(script.requests) == 1
        async with asyncio.timeout(20):
            assert (await policy.generate(prompt("next"), Sampling())).text == "<answer>Up</answer>"


async def test_calls_cancelled_at_any_moment_leave_the_others_alone(server_url: str) -> None:
    async with opened(server_url, max_connections=3) as policy:
        calls = [asyncio.create_task(policy.generate(prompt(place), Sampling())) for place in range(60)]
        for task in calls[::2]:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait(calls)
        assert all("<answer>" in task.result().text for task in calls[1::2])
        assert len(await generate_many(policy, 5)) == 5


async def test_no_more_connections_are_used_than_allowed() -> None:
    script = Scripted((200, COMPLETION, {}))
    async with served(script) as url, opened(url, max_connections=3) as policy:
        await generate_many(policy, 30)
    assert script.most_at_once == 3


async def test_a_long_completion_comes_back_whole() -> None:
    text = "long " * 200_000
    script = Scripted((200, {"choices": [{"message": {"content": text}}]}, {}))
    async with served(script) as url, opened(url) as policy:
        assert (await policy.generate(prompt("k"), Sampling())).text == text


async def test_waiting_for_a_connection_does_not_count_against_the_time_limit() -> None:
    async with (
        simulated_server(latency=0.1, latency_sigma=0) as server,
        opened(server.base_url, max_connections=1, request_timeout=1.0) as policy,
    ):
        await generate_many(policy, 14)  # the last one waits for longer than the limit
        assert not policy.counters.retries


def use_in_two_loops(url: str, close_in_the_first: bool) -> list[str]:
    """Plays in one event loop after the other, and gives the warnings of what was left open."""

    def use() -> None:
        policy = OpenAIPolicy(OpenAIPolicyConfig(base_url=url, model="m"))

        async def main(close: bool) -> None:
            await generate_many(policy, 3)
            if close:
                await policy.close()

        asyncio.run(main(close_in_the_first))
        asyncio.run(main(close=True))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use()
        gc.collect()
    return [str(warning.message) for warning in caught]


def test_it_serves_one_event_loop_after_the_other_and_leaves_nothing_open(server_url: str) -> None:
    assert use_in_two_loops(server_url, close_in_the_first=True) == []


def test_a_loop_that_ended_without_close_does_not_spoil_the_next(server_url: str) -> None:
    told = use_in_two_loops(server_url, close_in_the_first=False)
    assert told  # asyncio's own: the first loop ended with open sockets
    assert not any("client session" in message or "connector" in message for message in told)


async def test_after_close_a_call_opens_new_connections(server_url: str) -> None:
    async with opened(server_url) as policy:
        before = await generate_many(policy, 2)
        await policy.close()
        again = await generate_many(policy, 2)
    assert all(each.text for each in [*before, *again])
    assert policy.counters.failures == {}
    assert policy.counters.retries == {}


async def test_the_version_is_what_it_was_last_set_to() -> None:
    async with opened("http://127.0.0.1:9/v1", version=3) as policy:
        assert policy.version == 3
        policy.set_version(4)
        assert policy.version == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "127.0.0.1:8000"}, "base_url: '127.0.0.1:8000' is not a URL like http://"),
        ({"base_url": "ftp://host/v1"}, "base_url: 'ftp://host/v1' is not a URL like http://"),
        ({"base_url": "http://host:port/v1"}, "base_url: 'http://host:port/v1' is not a URL"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "the environment variable NO_SUCH_VARIABLE is not set"),
        ({"api_key_env": "HOME", "api_key": "k"}, "api_key and api_key_env: give one of them"),
        ({"api_key": "two\nlines"}, "api_key: holds a character that no HTTP header can carry"),
        ({"extra_body": {"stream": True}}, "extra_body.stream: cannot be set here"),
        ({"extra_body": {"logit_bias": object()}}, "extra_body: not plain data"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    api_key = options.pop("api_key", None)
    settings = OpenAIPolicyConfig(**{"base_url": "http://host/v1", "model": "m", **options})
    with pytest.raises(ConfigError) as refusal:
        OpenAIPolicy(settings, api_key=api_key)
    assert message in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "http://me:pw@host/v1"}, "policy.base_url: holds a password or a key"),
        ({"api": "responses"}, "policy.api: got 'responses'"),
        ({"request_timeout": 0}, "policy.request_timeout: got 0"),
        ({"max_connections": 0}, "policy.max_connections: got 0"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    policy = {"kind": "openai", "base_url": "http://host/v1", "model": "m", **options}
    with pytest.raises(ConfigError) as refusal:
        build({"policy": policy, "train_env_manager": {"num_env_groups": 1, "tags": ["FrozenLake"]}})
    assert message in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.fixture
def server_url() -> Iterator[str]:
    """A server that outlives the event loops of the test."""
    command = [sys.executable, "-m", "rollwright.simulation.server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        process.terminate()
