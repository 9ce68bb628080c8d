"""The hosted policy against a local server that behaves as hosted APIs do: limits, refusals, reasoning, formats, compression."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import rollwright as rw
from rollwright.engines.base import EngineError, Prompt, Sampling, ToolSpec
from rollwright.engines.constraints import json_schema
from rollwright.engines.openai import OpenAIPolicy
from rollwright.engines.rate_limits import RateLimiter, seconds_of
from rollwright.engines.settings import OpenAIPolicyConfig
from rollwright.http.retry import RetryPolicy
from rollwright.trajectory import Message

QUICK = RetryPolicy(max_retries=2, first=0.01, longest=0.05)


class HostedApi:
    """Chat completions as a hosted API serves them."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.refuse: list[tuple[int, dict[str, Any], dict[str, str]]] = []
        """Status, body and headers of the next answers that are no completions."""
        self.headers: dict[str, str] = {}
        self.only_completion_limit = False
        self.compress = False
        self.message: dict[str, Any] = {"role": "assistant", "content": "four"}
        self.encodings: list[str] = []

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.encodings.append(request.headers.get("Accept-Encoding", ""))
        if self.only_completion_limit and "max_tokens" in body:
            error = {
                "message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
                "'max_completion_tokens' instead.",
                "param": "max_tokens",
            }
            return web.json_response({"error": error}, status=400)
        if self.refuse:
            status, content, headers = self.refuse.pop(0)
            return web.json_response(content, status=status, headers=headers)
        usage = {
            "prompt_tokens": 100,
            "completion_tokens": 40,
            "prompt_tokens_details": {"cached_tokens": 64},
            "completion_tokens_details": {"reasoning_tokens": 30},
        }
        answer = {"choices": [{"message": self.message, "finish_reason": "stop"}], "usage": usage}
        response = web.json_response(answer, headers=self.headers)
        if self.compress:
            response.enable_compression(web.ContentCoding.gzip)
        return response


@pytest.fixture
async def api() -> AsyncIterator[tuple[HostedApi, str]]:
    hosted = HostedApi()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", hosted.chat)
    app.router.add_get("/v1/models", hosted.models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield hosted, f"http://127.0.0.1:{port}/v1"
    await runner.cleanup()


def ask(number: int = 0, **given: Any) -> Prompt:
    return Prompt("e", ("k", number), (Message("user", "2 + 2?"),), **given)


async def test_usage_reasoning_and_tools_are_taken_over(api: tuple[HostedApi, str]) -> None:
    hosted, url = api
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    hosted.message = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "two and two",
        "tool_calls": [call],
    }
    policy = OpenAIPolicy(OpenAIPolicyConfig(base_url=url, model="m"))
    made = await policy.generate(ask(tools=(ToolSpec("add"),)), Sampling(max_tokens=50))
    assert (made.prompt_tokens, made.cached_tokens) == (100, 64)
    assert (made.completion_tokens, made.reasoning_tokens) == (40, 30)
    assert made.reasoning == "two and two"
    assert made.tool_calls[0].name == "add"
    assert not made.exact
    assert hosted.bodies[0]["tools"][0]["function"]["name"] == "add"
    await policy.close()


async def test_the_name_of_the_token_limit_is_found_out_once(api: tuple[HostedApi, str]) -> None:
    hosted, url = api
    hosted.only_completion_limit = True
    policy = OpenAIPolicy(OpenAIPolicyConfig(base_url=url, model="m"), retry=QUICK)
    for number in range(2):
        await policy.generate(ask(number), Sampling(max_tokens=50))
    assert ["max_tokens" in each for each in hosted.bodies] == [True, False, False]
    assert hosted.bodies[-1]["max_completion_tokens"] == 50
    await policy.close()
    fixed = OpenAIPolicy(
        OpenAIPolicyConfig(
            base_url=url, model="m", token_limit="max_completion_tokens", omit=("temperature", "top_p")
        )
    )
    await fixed.generate(ask(), Sampling(max_tokens=7))
    assert hosted.bodies[-1]["max_completion_tokens"] == 7
    assert not {"temperature", "top_p", "max_tokens"} & hosted.bodies[-1].keys()
    await fixed.close()


async def test_a_json_schema_is_asked_for_in_the_apis_words(api: tuple[HostedApi, str]) -> None:
    hosted, url = api
    policy = OpenAIPolicy(OpenAIPolicyConfig(base_url=url, model="m"))
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    made = await policy.generate(ask(), Sampling(output=json_schema(schema, "sum")))
    assert hosted.bodies[0]["response_format"]["json_schema"]["schema"] == schema
    assert policy.constrains_output
    assert made.text == "four"
    await policy.close()


async def test_compressed_answers_are_read(api: tuple[HostedApi, str]) -> None:
    hosted, url = api
    hosted.compress = True
    policy = OpenAIPolicy(OpenAIPolicyConfig(base_url=url, model="m", compress=True))
    assert (await policy.generate(ask(), Sampling())).text == "four"
    assert "gzip" in hosted.encodings[0]
    await policy.close()


async def test_a_storm_of_429_fails_no_call_and_pauses_all_of_them(
    api: tuple[HostedApi, str], tmp_path: Path
) -> None:
    hosted, url = api
    hosted.refuse = [(429, {"error": {"message": "slow down"}}, {"Retry-After": "0.05"})] * 40
    policy = OpenAIPolicy(OpenAIPolicyConfig(base_url=url, model="m"), retry=QUICK, rates_folder=tmp_path)
    made = await asyncio.gather(*(policy.generate(ask(number), Sampling()) for number in range(8)))
    assert [each.text for each in made] == ["four"] * 8
    assert len(hosted.bodies) == 48
    assert policy.pressure == 40
    await policy.close()


async def test_a_used_up_quota_is_told_at_once(api: tuple[HostedApi, str]) -> None:
    hosted, url = api
    gone = {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}
    hosted.refuse = [(429, gone, {})] * 50
    policy = OpenAIPolicy(OpenAIPolicyConfig(base_url=url, model="m"), retry=QUICK)
    with pytest.raises(EngineError, match="quota"):
        await policy.generate(ask(), Sampling())
    assert len(hosted.bodies) == 1
    await policy.close()


async def test_patience_with_429_ends(api: tuple[HostedApi, str]) -> None:
    hosted, url = api
    hosted.refuse = [(429, {"error": "busy"}, {})] * 1000
    policy = OpenAIPolicy(OpenAIPolicyConfig(base_url=url, model="m", rate_limit_patience=0.3), retry=QUICK)
    with pytest.raises(EngineError, match="HTTP 429: busy"):
        await policy.generate(ask(), Sampling())
    await policy.close()


async def test_episodes_survive_a_storm_of_429(api: tuple[HostedApi, str]) -> None:
    hosted, url = api
    hosted.refuse = [(429, {"error": "busy"}, {"Retry-After": "0.01"})] * 30
    hosted.message = {"role": "assistant", "content": "<answer>Right</answer>"}
    policy = {"kind": "openai", "base_url": url, "model": "m", "max_retries": 1}
    found = await asyncio.to_thread(
        lambda: rw.evaluate({"limits": {"max_attempts": 1}}, tags=["FrozenLake"], episodes=6, policy=policy)
    )
    assert found.report["episodes"] == {"finished": 6, "failed": 0, "not_played": 0}
    total = found.report["cost"]["by"]["model"]["m"]
    assert total["cached"] == 64 * total["calls"]
    assert total["reasoning"] == 30 * total["calls"]


def limiter(folder: Path, clock: list[float], **limits: float) -> RateLimiter:
    return RateLimiter("api", folder=folder, clock=lambda: clock[0], **limits)  # type: ignore[arg-type]


def test_requests_and_tokens_of_a_minute_are_shared_by_processes(tmp_path: Path) -> None:
    clock = [1000.0]
    first, second = (
        limiter(tmp_path, clock, requests_per_minute=4, tokens_per_minute=1000) for _ in range(2)
    )
    assert [each.reserve(200) for each in (first, second, first, second)] == [0.0] * 4
    assert first.reserve(200) == pytest.approx(15.0)
    clock[0] += 15.0
    assert second.reserve(300) == 0.0
    clock[0] += 15.0
    assert first.reserve(500) > 0  # a request is free, its tokens are not
    first.settle(300, 0)
    assert first.reserve(500) == 0.0


def test_headers_tell_limits_and_a_pause_holds_everybody(tmp_path: Path) -> None:
    clock = [1000.0]
    first, second = limiter(tmp_path, clock), limiter(tmp_path, clock)
    first.observe(
        Told(
            {
                "x-ratelimit-limit-requests": "60",
                "x-ratelimit-remaining-requests": "1",
                "x-ratelimit-reset-requests": "1s",
            }
        )
    )
    assert second.reserve(10) == 0.0
    assert second.reserve(10) == pytest.approx(1.0)
    first.pause(7.0)
    assert second.reserve(10) == pytest.approx(7.0)
    second.observe(Told({"x-ratelimit-limit-tokens": "junk"}))


class Told:
    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers

    def header(self, name: str) -> str | None:
        return self._headers.get(name)


def test_a_request_larger_than_the_bucket_goes_when_it_is_full(tmp_path: Path) -> None:
    assert limiter(tmp_path, [1000.0], tokens_per_minute=100).reserve(5000) == 0.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("6m0s", 360.0), ("20ms", 0.02), ("1.5s", 1.5), ("2", 2.0), ("1h2m3s", 3723.0), ("soon", None)],
)
def test_durations_of_headers(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


async def test_calls_wait_for_the_limit_instead_of_being_refused(
    api: tuple[HostedApi, str], tmp_path: Path
) -> None:
    hosted, url = api
    policy = OpenAIPolicy(
        OpenAIPolicyConfig(base_url=url, model="m", requests_per_minute=1200), rates_folder=tmp_path
    )
    RateLimiter(policy.rates_name, folder=tmp_path, requests_per_minute=1200).pause(0.2)
    began = time.monotonic()
    await asyncio.gather(*(policy.generate(ask(number), Sampling()) for number in range(4)))
    assert time.monotonic() - began >= 0.2
    assert len(hosted.bodies) == 4
    assert json.dumps(hosted.bodies[0])
    await policy.close()
