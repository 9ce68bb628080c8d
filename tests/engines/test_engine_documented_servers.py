"""SGLang and llama.cpp cannot be had here: their clients against small servers that answer as documented."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollwright.engines.base import Prompt, Sampling, UpdateMode, Weights
from rollwright.engines.llama_cpp import LlamaCppPolicy
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.engines.sglang import SglangPolicy
from rollwright.errors import ConfigError
from rollwright.http.retry import FaultCause, RetryPolicy
from rollwright.trajectory import FinishReason, Message, expand_versions

FAST = RetryPolicy(max_retries=20, first=0.01, factor=1.2, longest=0.05)
RENDERER = BytesRenderer()
TOKEN_SECONDS = 0.01


def prompt(place: int) -> Prompt:
    ids = RENDERER.open([Message("user", "go")])
    return Prompt(episode=f"e{place}", key=("run", place), messages=(), ids=ids)


class Sglang:
    """`/generate`, pausing and weights from disk; a token's log-probability tells which weights made it."""

    def __init__(self, *, original: bool = False) -> None:
        """`original`: log-probabilities are taken before the temperature."""
        self.original = original
        self.version = "default"
        self.loads = 0
        self.running: set[asyncio.Event] = set()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.asked: list[Any] = []

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        await self.go_on.wait()
        abort = asyncio.Event()
        self.running.add(abort)
        limit = body["sampling_params"]["max_new_tokens"]
        made: list[list[Any]] = []
        while len(made) < limit and not abort.is_set():
            await asyncio.sleep(TOKEN_SECONDS)
            made.append([-(1 + self.loads) / 8, 97, None])
        self.running.discard(abort)
        how = "abort" if abort.is_set() and len(made) < limit else "length"
        meta = {
            "finish_reason": {"type": how},
            "output_token_logprobs": made,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(made),
            "weight_version": self.version,
        }
        if body.get("top_logprobs_num"):
            heat = 1.0 if self.original else body["sampling_params"]["temperature"]
            meta["output_top_logprobs"] = [[[-1.0 - heat, 97, None]] for _ in made]
        return web.json_response(
            {"text": "a" * len(made), "output_ids": [each[1] for each in made], "meta_info": meta}
        )

    async def pause(self, request: web.Request) -> web.Response:
        assert (await request.json())["mode"] == "abort"
        self.go_on.clear()
        for abort in self.running:
            abort.set()
        return web.json_response({"status": "ok"})

    async def go(self, request: web.Request) -> web.Response:
        self.go_on.set()
        return web.json_response({"status": "ok"})

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        while self.running:  # waits for what is under way, as documented
            await asyncio.sleep(0.002)
        if body["model_path"] == "missing":
            return web.json_response({"success": False, "message": "no such folder"}, status=400)
        self.loads += 1
        self.version = body["weight_version"]
        return web.json_response({"success": True, "message": "ok"})

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "some/model", "weight_version": self.version})

    def routes(self) -> list[web.AbstractRouteDef]:
        return [
            web.post("/generate", self.generate),
            web.post("/pause_generation", self.pause),
            web.post("/continue_generation", self.go),
            web.post("/update_weights_from_disk", self.load),
            web.get("/get_model_info", self.info),
            web.get("/health", self.info),
        ]


class LlamaServer:
    def __init__(self, ids: bool) -> None:
        self.ids = ids

    async def complete(self, request: web.Request) -> web.Response:
        count = (await request.json())["n_predict"]
        answer: dict[str, Any] = {"content": "a" * count, "stop_type": "limit", "tokens_predicted": count}
        if self.ids:
            answer["tokens"] = [97] * count
            answer["completion_probabilities"] = [{"id": 97, "prob": 0.5, "token": "a"}] * count
        return web.json_response(answer)

    async def props(self, request: web.Request) -> web.Response:
        return web.json_response({"build_info": "b9000", "model_alias": "m"})

    def routes(self) -> list[web.AbstractRouteDef]:
        return [web.post("/completion", self.complete), web.get("/props", self.props)]


@asynccontextmanager
async def served(server: Sglang | LlamaServer) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes(server.routes())
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_sglang_is_asked_for_ids_and_gives_them_exactly() -> None:
    server = Sglang()
    async with served(server) as url:
        policy = SglangPolicy(url, RENDERER, retry=FAST)
        found = await policy.probe()
        assert (found.engine, found.model, found.trainable) == ("SGLang", "some/model", True)
        assert found.update_modes == tuple(UpdateMode)
        made = await policy.generate(prompt(0), Sampling(max_tokens=5))
        assert (made.text, made.finish, made.exact) == ("aaaaa", FinishReason.LENGTH, True)
        assert server.asked[-1]["input_ids"] == prompt(0).ids.tolist()  # type: ignore[union-attr]
        assert not (await policy.generate(prompt(0), Sampling(max_tokens=2, top_p=0.5))).exact
        await policy.close()


@pytest.mark.parametrize("original", [False, True])
async def test_sglangs_logprobs_count_at_another_temperature_only_if_they_are_taken_after_it(
    original: bool,
) -> None:
    server = Sglang(original=original)
    async with served(server) as url:
        policy = SglangPolicy(url, RENDERER, retry=FAST)
        assert (await policy.generate(prompt(0), Sampling(max_tokens=1))).exact
        warm = await policy.generate(prompt(0), Sampling(max_tokens=1, temperature=0.7))
        assert warm.exact is not original
        assert ("SGLANG_RETURN_ORIGINAL_LOGPROB" in (await policy.probe()).missing) is original
        await policy.close()


@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_sglang_takes_new_weights_while_calls_run(mode: UpdateMode) -> None:
    async with served(Sglang()) as url:
        policy = SglangPolicy(url, RENDERER, retry=FAST)
        calls = [
            asyncio.create_task(policy.generate(prompt(place), Sampling(max_tokens=40))) for place in range(5)
        ]
        await asyncio.sleep(10 * TOKEN_SECONDS)
        await policy.update_weights(Weights(1, Path("folder")), mode)
        for made in await asyncio.gather(*calls):
            assert len(made.sampled_ids) == 40
            stamps = expand_versions(made.versions)
            assert made.logprobs.tolist() == [-(1 + version) / 8 for version in stamps]
            expected = {
                UpdateMode.DRAIN: {0},
                UpdateMode.ABORT_AND_RESUME: {0, 1},
                UpdateMode.RESTART_TURN: {1},
            }
            assert set(stamps) == expected[mode]
        await policy.close()


async def test_an_answer_made_by_other_weights_is_not_used_and_the_engine_gets_the_right_ones() -> None:
    server = Sglang()
    async with served(server) as url:
        policy = SglangPolicy(url, RENDERER, retry=FAST)
        await policy.update_weights(Weights(1, Path("folder")), UpdateMode.DRAIN)
        server.version, server.loads = "default", 0  # as after a restart that nobody saw
        made = await policy.generate(prompt(0), Sampling(max_tokens=3))
        assert server.version == "1"
        assert policy.counters.retries == {FaultCause.SERVER_ERROR: 1}
        assert made.versions[0].version == 1
        await policy.close()


async def test_llama_cpp_with_ids_is_exact_and_cannot_exchange_weights() -> None:
    async with served(LlamaServer(ids=True)) as url:
        policy = LlamaCppPolicy(url, RENDERER, retry=FAST)
        found = await policy.probe()
        assert (found.engine, found.trainable, found.update_modes) == ("llama.cpp b9000", True, ())
        made = await policy.generate(prompt(0), Sampling(max_tokens=3))
        assert made.exact
        assert made.logprobs.tolist() == pytest.approx([-0.6931] * 3, abs=1e-3)
        with pytest.raises(ConfigError, match="cannot exchange weights"):
            await policy.update_weights(Weights(1, Path("folder")), UpdateMode.DRAIN)
        assert (await policy.generate(prompt(1), Sampling(max_tokens=3))).exact
        await policy.close()


async def test_llama_cpp_without_ids_is_for_evaluation_only() -> None:
    async with served(LlamaServer(ids=False)) as url:
        policy = LlamaCppPolicy(url, RENDERER, retry=FAST)
        found = await policy.probe()
        assert not found.trainable
        assert "evaluation only" in found.missing
        made = await policy.generate(prompt(0), Sampling(max_tokens=3))
        assert (made.text, made.exact, len(made.sampled_ids)) == ("aaa", False, 0)
        await policy.close()
