"""LoRA adapters by name, against small servers that answer as vLLM and SGLang do: a new name for each version, calls under way
finish with theirs, old ones are unloaded, and no server is left behind."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from rollwright.engines.base import EngineError, Generation, Prompt, Sampling, UpdateMode, Weights
from rollwright.engines.http_policy import HttpEnginePolicy
from rollwright.engines.llama_cpp import LlamaCppDialect
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.engines.settings import EngineServersConfig
from rollwright.engines.sglang import SglangDialect
from rollwright.engines.vllm import VllmDialect
from rollwright.errors import ConfigError
from rollwright.models import weights_checksum
from rollwright.trajectory import Message, expand_versions

RENDERER = BytesRenderer()
TOKEN_SECONDS = 0.01


class AdapterServer:
    """A token's log-probability tells which adapter made it; a request for an unknown one is refused."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.adapters: dict[str, str] = {}
        self.loads: list[str] = []
        self.unloaded: list[str] = []
        self.refuse: str | None = None
        self.unknown = 0
        """Requests for an adapter that is not there."""
        self.held: dict[int, asyncio.Event] = {}
        """Requests of these versions wait for an event."""

    async def _tokens(self, name: str | None, count: int) -> list[float] | None:
        if name is not None and name not in self.adapters:
            self.unknown += 1
            return None
        version = -1 if name is None else int(name.split("-")[1])
        made = []
        if version in self.held:
            await self.held[version].wait()
        for _ in range(count):
            await asyncio.sleep(TOKEN_SECONDS)
            if name is not None and name not in self.adapters:  # unloaded under a running request
                self.unknown += 1
                return None
            made.append(-(2 + version) / 8)
        return made

    async def _load(self, request: web.Request) -> str | None:
        """The reason why an adapter is not loaded."""
        body = await request.json()
        if self.refuse is not None:
            return self.refuse
        if body["lora_name"] in self.adapters:
            return f"The lora adapter '{body['lora_name']}' has already been loaded: already loaded."
        if not (Path(body["lora_path"]) / "adapter_config.json").is_file():
            return "No adapter found"
        self.adapters[body["lora_name"]] = body["lora_path"]
        self.loads.append(body["lora_name"])
        return None

    async def _unload(self, request: web.Request) -> str | None:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return f"The lora adapter '{name}' cannot be found."
        self.unloaded.append(name)
        return None

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", "weight_version": "default"})

    def routes(self) -> list[web.AbstractRouteDef]:
        raise NotImplementedError


class Vllm(AdapterServer):
    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        made = await self._tokens(None if body["model"] == "base" else body["model"], body["max_tokens"])
        if made is None:
            return web.json_response(
                {"error": {"message": "The model does not exist.", "code": 404}}, status=404
            )
        choice = {
            "finish_reason": "length",
            "token_ids": [97] * len(made),
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": made, "top_logprobs": [{"a": each} for each in made]},
        }
        return web.json_response({"choices": [choice]})

    async def load(self, request: web.Request) -> web.Response:
        if (why := await self._load(request)) is not None:
            return web.json_response({"error": {"message": why}}, status=400)
        return web.Response(text="Success")

    async def unload(self, request: web.Request) -> web.Response:
        if (why := await self._unload(request)) is not None:
            return web.json_response({"error": {"message": why}}, status=404)
        return web.Response(text="Success")

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in ("base", *self.adapters)]})

    def routes(self) -> list[web.AbstractRouteDef]:
        own = [
            web.post("/v1/load_lora_adapter", self.load),
            web.post("/v1/unload_lora_adapter", self.unload),
        ]
        return [
            web.post("/v1/completions", self.complete),
            web.get("/v1/models", self.models),
            web.get("/health", self.health),
            *(own if self.enabled else ()),
        ]


class Sglang(AdapterServer):
    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        made = await self._tokens(body.get("lora_path"), body["sampling_params"]["max_new_tokens"])
        if made is None:
            return web.json_response({"error": {"message": "adapter is not loaded"}}, status=400)
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[each, 97, None] for each in made],
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": "default",
        }
        return web.json_response({"output_ids": [97] * len(made), "meta_info": meta})

    async def load(self, request: web.Request) -> web.Response:
        why = await self._load(request)
        told = {"success": why is None, "error_message": why or "", "loaded_adapters": self.adapters}
        return web.json_response(told, status=200 if why is None else 400)

    async def unload(self, request: web.Request) -> web.Response:
        why = await self._unload(request)
        told = {"success": why is None, "error_message": why or "", "loaded_adapters": self.adapters}
        return web.json_response(told, status=200 if why is None else 400)

    def routes(self) -> list[web.AbstractRouteDef]:
        own = [web.post("/load_lora_adapter", self.load), web.post("/unload_lora_adapter", self.unload)]
        return [
            web.post("/generate", self.generate),
            web.get("/get_model_info", self.health),
            web.get("/health", self.health),
            *(own if self.enabled else ()),
        ]


@asynccontextmanager
async def opened(*servers: AdapterServer) -> AsyncIterator[HttpEnginePolicy]:
    runners, urls = [], []
    for server in servers:
        app = web.Application()
        app.add_routes(server.routes())
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    dialect = VllmDialect("base") if isinstance(servers[0], Vllm) else SglangDialect()
    settings = EngineServersConfig(base_urls=urls, max_retries=2)
    policy = HttpEnginePolicy(settings, dialect, RENDERER)
    try:
        yield policy
    finally:
        await policy.close()
        for runner in runners:
            await runner.cleanup()


def adapter(place: Path, version: int) -> Weights:
    """A folder that looks like an adapter, with a content of its own."""
    import numpy
    from safetensors.numpy import save_file

    folder = place / f"{version:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    save_file({"lora": numpy.full(3, version, dtype="float32")}, folder / "adapter_model.safetensors")
    return Weights(version=version, adapter=folder, checksum=weights_checksum(folder))


async def calls(policy: HttpEnginePolicy, places: Sequence[int], tokens: int = 10) -> list[Generation]:
    ids = RENDERER.open([Message("user", "go")])

    async def one(place: int) -> Generation:
        prompt = Prompt(episode=f"e{place}", key=("run", place), messages=(), ids=ids)
        return await policy.generate(prompt, Sampling(max_tokens=tokens))

    return list(await asyncio.gather(*map(one, places)))


def assert_exact(made: Sequence[Generation]) -> set[int]:
    """Every token has the version of the adapter that made it, one for a whole call; returns the versions."""
    seen = set()
    for each in made:
        stamps = expand_versions(each.versions)
        assert list(each.logprobs) == pytest.approx([-(2 + version) / 8 for version in stamps])
        assert len(set(stamps)) == 1
        seen |= set(stamps)
    return seen


KINDS = [Vllm, Sglang]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", list(UpdateMode))
async def test_calls_under_way_finish_with_their_adapter_and_new_ones_take_the_new_one(
    kind: type[AdapterServer], mode: UpdateMode, tmp_path: Path
) -> None:
    servers = [kind(), kind()]
    async with opened(*servers) as policy:
        await policy.update_weights(adapter(tmp_path, 0), mode)
        held = asyncio.Event()
        for server in servers:
            server.held[0] = held
        running = asyncio.create_task(calls(policy, range(8)))
        while policy.counters.requests < 8:
            await asyncio.sleep(0)
        await policy.update_weights(adapter(tmp_path, 1), mode)
        assert policy.version == 1
        assert assert_exact(await calls(policy, range(8, 16))) == {1}
        assert not running.done()
        held.set()
        assert assert_exact(await running) == {0}
        while any(len(server.adapters) > 1 for server in servers):
            await asyncio.sleep(0.01)
    for server in servers:
        assert [name.split("-")[1] for name in server.loads] == ["0", "1"]
        assert [name.split("-")[1] for name in server.unloaded] == ["0"]
        assert server.unknown == 0
    assert policy.counters.resumed_calls == policy.counters.restarted_calls == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_many_updates_under_load_mix_no_versions_and_leave_one_adapter(
    kind: type[AdapterServer], tmp_path: Path
) -> None:
    servers = [kind(), kind(), kind()]
    async with opened(*servers) as policy:
        await policy.update_weights(adapter(tmp_path, 0), UpdateMode.ABORT_AND_RESUME)
        running = []
        for version in range(1, 6):
            running.append(asyncio.create_task(calls(policy, range(9), tokens=version * 3)))
            await asyncio.sleep(2 * TOKEN_SECONDS)
            await policy.update_weights(adapter(tmp_path, version), UpdateMode.ABORT_AND_RESUME)
        for number, each in enumerate(running):
            assert assert_exact(await each) == {number}
        while any(len(server.adapters) > 1 for server in servers):
            await asyncio.sleep(0.01)
    assert all(server.unknown == 0 for server in servers)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_does_not_load_the_adapter_serves_nobody_until_it_has(
    kind: type[AdapterServer], tmp_path: Path
) -> None:
    good, bad = kind(), kind()
    async with opened(good, bad) as policy:
        await policy.update_weights(adapter(tmp_path, 0), UpdateMode.DRAIN)
        bad.refuse = "out of memory"
        await policy.update_weights(adapter(tmp_path, 1), UpdateMode.DRAIN)
        assert assert_exact(await calls(policy, range(6))) == {1}
        bad.refuse = None
        while not any(name.startswith("rollwright-1-") for name in bad.adapters):
            await asyncio.sleep(0.02)
        assert assert_exact(await calls(policy, range(20, 40))) == {1}
        assert bad.unknown == good.unknown == 0


async def test_a_restarted_server_gets_the_adapter_before_the_next_call(tmp_path: Path) -> None:
    server = Vllm()
    async with opened(server) as policy:
        await policy.update_weights(adapter(tmp_path, 3), UpdateMode.DRAIN)
        await calls(policy, [0], tokens=1)
        server.adapters.clear()
        await asyncio.sleep(1.1)  # longer than any restart is unnoticed
        assert assert_exact(await calls(policy, [1])) == {3}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_without_adapters_says_how_to_start_it(
    kind: type[AdapterServer], tmp_path: Path
) -> None:
    async with opened(kind(enabled=False)) as policy:
        with pytest.raises(EngineError, match=r"takes no adapters; start it with .*--enable-lora"):
            await policy.update_weights(adapter(tmp_path, 1), UpdateMode.DRAIN)
        assert policy.version == 0


async def test_a_damaged_adapter_reaches_no_server(tmp_path: Path) -> None:
    server = Vllm()
    async with opened(server) as policy:
        weights = adapter(tmp_path, 1)
        (tmp_path / "000001" / "adapter_model.safetensors").write_bytes(b"0" * 100)
        with pytest.raises(EngineError, match="has checksum"):
            await policy.update_weights(weights, UpdateMode.DRAIN)
    assert server.loads == []


async def test_an_engine_of_another_kind_takes_no_adapters(tmp_path: Path) -> None:
    policy = HttpEnginePolicy("http://127.0.0.1:9", LlamaCppDialect(), RENDERER)
    assert not policy.takes_adapters
    with pytest.raises(ConfigError, match="takes no adapters; accepted: folders"):
        await policy.update_weights(adapter(tmp_path, 1), UpdateMode.DRAIN)
    await policy.close()
