"""One update of several engines, some of which fail, hang, restart or come late in the middle of it: none is left behind, and
every token has the version of the weights that made it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from rollwright.engines import pool
from rollwright.engines.base import EngineError, Generation, Prompt, Sampling, UpdateMode, Weights
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.engines.settings import EngineServersConfig
from rollwright.engines.vllm import VllmPolicy
from rollwright.http.retry import RetryPolicy
from rollwright.trajectory import Message, expand_versions

RENDERER = BytesRenderer()
TOKEN_SECONDS = 0.005
STEPS_OF_AN_UPDATE = (
    "/pause",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/resume",
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def logprob_of(version: int) -> float:
    return -(1 + version) / 8


class Engine:
    """Answers as vLLM does. A token's log-probability tells the version of the weights that made it, and faults of single
    endpoints can be ordered."""

    def __init__(self) -> None:
        self.version = 0
        self.label = "default"
        self.paused = False
        self.faults: dict[str, list[str]] = {}
        """By path: what happens to the next requests, `500`, `drop`, `hang`, or `lost`: done, but never answered."""
        self.seen: Counter[str] = Counter()
        self.hold: asyncio.Event | None = None
        """While set, completions wait for it before the engine has them, as in a network that delays them."""
        self.port = 0
        self._changed = asyncio.Condition()
        self._aborts = 0

    @web.middleware
    async def meet(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.seen[request.path] += 1
        waiting = self.faults.get(request.path)
        match waiting.pop(0) if waiting else "":
            case "500":
                return web.json_response({"error": {"message": "out of luck"}}, status=500)
            case "drop":
                assert request.transport is not None
                request.transport.close()
            case "hang":
                await asyncio.sleep(3600)
            case "lost":
                await handler(request)
                await asyncio.sleep(3600)
        return await handler(request)

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.hold is not None:
            await self.hold.wait()
        while self.paused:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.paused)
        aborts, made = self._aborts, []
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(TOKEN_SECONDS)
            if self._aborts != aborts:
                break
            made.append(logprob_of(self.version))
        choice = {
            "finish_reason": "length" if len(made) == body["max_tokens"] else "abort",
            "token_ids": [97] * len(made),
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": made, "top_logprobs": [{"a": each} for each in made]},
        }
        return web.json_response({"choices": [choice]})

    async def pause(self, request: web.Request) -> web.Response:
        self.paused = True
        self._aborts += request.query["mode"] == "abort"
        return web.json_response({})

    async def resume(self, request: web.Request) -> web.Response:
        async with self._changed:
            self.paused = False
            self._changed.notify_all()
        return web.json_response({})

    async def load(self, request: web.Request) -> web.Response:
        self.version = int(Path((await request.json())["kwargs"]["weights_path"]).name)
        return web.json_response({})

    async def relabel(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({})

    async def empty(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        app = web.Application(middlewares=[self.meet])
        handlers = (self.pause, self.load, self.empty, self.relabel, self.resume)
        app.add_routes(web.post(path, each) for path, each in zip(STEPS_OF_AN_UPDATE, handlers, strict=True))
        app.add_routes([web.post("/v1/completions", self.complete)])
        app.add_routes([web.get("/health", self.empty), web.get("/weight_info", self.info)])
        runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.port = runner.addresses[0][1]
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            await runner.cleanup()


@asynccontextmanager
async def opened(*engines: Engine, patience: float = 20.0) -> AsyncIterator[VllmPolicy]:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(engine.serving()) for engine in engines]
        settings = EngineServersConfig(base_urls=urls, outage_patience=patience)
        policy = VllmPolicy(settings, "m", RENDERER, retry=RetryPolicy(40, first=0.01, longest=0.05))
        stack.push_async_callback(policy.close)
        yield policy


async def call(policy: VllmPolicy, place: int, tokens: int = 8) -> Generation:
    ids = RENDERER.open([Message("user", "go")])
    prompt = Prompt(episode=f"e{place}", key=("run", place), messages=(), ids=ids)
    return await policy.generate(prompt, Sampling(max_tokens=tokens))


async def calls(policy: VllmPolicy, places: Sequence[int], tokens: int = 8) -> list[Generation]:
    return list(await asyncio.gather(*(call(policy, place, tokens) for place in places)))


def assert_exact(made: Sequence[Generation]) -> set[int]:
    """Every token has the version of the weights that made it; returns the versions."""
    for each in made:
        stamps = expand_versions(each.versions)
        assert list(each.logprobs) == pytest.approx([logprob_of(version) for version in stamps])
        assert list(stamps) == sorted(stamps)
    return {run.version for each in made for run in each.versions}


def weights(version: int) -> Weights:
    return Weights(version, Path(f"weights/{version:06d}"))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that hang are noticed sooner than a user would want."""
    monkeypatch.setattr(pool, "PAUSE_SECONDS", 0.3)
    monkeypatch.setattr(pool, "STRAGGLER_SECONDS", 0.3)
    monkeypatch.setattr(pool, "GRACE_SECONDS", 0.3)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize("fault", ["500", "drop", "hang", "lost"])
@pytest.mark.parametrize("path", STEPS_OF_AN_UPDATE)
async def test_an_engine_that_fails_in_an_update_serves_nobody_before_it_has_the_weights(
    mode: UpdateMode, fault: str, path: str
) -> None:
    good, bad = Engine(), Engine()
    async with opened(good, bad) as policy:
        running = asyncio.create_task(calls(policy, range(8), 60))
        await until(lambda: good.seen["/v1/completions"] + bad.seen["/v1/completions"] == 8)
        bad.faults[path] = [fault]
        async with asyncio.timeout(10):
            await policy.update_weights(weights(1), mode)
            assert policy.version == 1
            after = await calls(policy, range(8, 16))
            assert assert_exact(after) == {1}
            assert_exact(await running)
        await until(lambda: policy._pool.router.serving == [0, 1])
        assert (bad.version, bad.label, bad.paused) == (1, "1", False)
        assert assert_exact(await calls(policy, range(16, 32))) == {1}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", ["/pause", "/collective_rpc"])
async def test_an_engine_that_hangs_in_every_update_holds_up_no_update_and_no_other_engine(path: str) -> None:
    good, other, bad = Engine(), Engine(), Engine()
    async with opened(good, other, bad) as policy:
        bad.faults[path] = ["hang"] * 1000
        for version in range(1, 4):
            async with asyncio.timeout(10):
                await policy.update_weights(weights(version), UpdateMode.ABORT_AND_RESUME)
            await until(lambda: bad.seen[path] > 1)  # its repair hangs, too
            await asyncio.sleep(1.1 * pool.SILENCE_SECONDS)  # so that engines are asked for their weights
            async with asyncio.timeout(10):
                assert assert_exact(await calls(policy, range(8))) == {version}
            assert policy._pool.router.serving == [0, 1]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("mode", [UpdateMode.ABORT_AND_RESUME, UpdateMode.RESTART_TURN])
async def test_a_call_on_its_way_to_an_engine_that_missed_the_update_is_never_taken_for_an_old_one(
    mode: UpdateMode,
) -> None:
    engine = Engine()
    async with opened(engine, Engine()) as policy:
        engine.hold = asyncio.Event()
        running = asyncio.create_task(calls(policy, range(4)))
        await until(lambda: engine.seen["/v1/completions"] == 2)
        engine.faults["/pause"] = ["500"]
        await policy.update_weights(weights(1), mode)
        await until(lambda: engine.version == 1 and not engine.paused)
        engine.hold.set()
        engine.hold = None
        async with asyncio.timeout(10):
            assert_exact(await running)


@pytest.mark.parametrize("fault", ["500", "drop"])
async def test_a_passing_fault_of_the_only_engine_does_not_end_the_update(fault: str) -> None:
    engine = Engine()
    async with opened(engine) as policy:
        for version, path in enumerate(STEPS_OF_AN_UPDATE, start=1):
            engine.faults[path] = [fault, fault]
            async with asyncio.timeout(10):
                await policy.update_weights(weights(version), UpdateMode.ABORT_AND_RESUME)
                assert assert_exact(await calls(policy, range(4))) == {version}


async def test_an_update_that_no_engine_takes_is_given_up_after_the_patience_in_one_line() -> None:
    engine = Engine()
    async with opened(engine, patience=0.5) as policy:
        engine.faults["/collective_rpc"] = ["500"] * 1000
        with pytest.raises(EngineError, match="out of luck") as error:
            async with asyncio.timeout(10):
                await policy.update_weights(weights(1), UpdateMode.ABORT_AND_RESUME)
        assert len(str(error.value).splitlines()) == 1
        assert policy.version == 0


async def test_an_engine_that_joins_late_gets_the_weights_before_its_first_call() -> None:
    first, late = Engine(), Engine()
    async with AsyncExitStack() as stack:
        async with late.serving():
            port = late.port
        url = await stack.enter_async_context(first.serving())
        settings = EngineServersConfig(base_urls=[url, f"http://127.0.0.1:{port}"])
        policy = VllmPolicy(settings, "m", RENDERER, retry=RetryPolicy(40, first=0.01, longest=0.05))
        stack.push_async_callback(policy.close)
        assert assert_exact(await calls(policy, range(8))) == {0}
        for version in (1, 2, 3):
            await policy.update_weights(weights(version), UpdateMode.ABORT_AND_RESUME)
        await stack.enter_async_context(late.serving(port))
        await until(lambda: policy._pool.router.serving == [0, 1])
        assert late.seen["/v1/completions"] == 0
        assert late.version == 3
        assert assert_exact(await calls(policy, range(20, 40))) == {3}
        assert late.seen["/v1/completions"] > 0


async def test_many_updates_of_engines_that_restart_mix_no_versions() -> None:
    steady, restarting = Engine(), Engine()
    done = asyncio.Event()
    async with AsyncExitStack() as stack:
        async with restarting.serving():
            port = restarting.port
        url = await stack.enter_async_context(steady.serving())
        settings = EngineServersConfig(base_urls=[url, f"http://127.0.0.1:{port}"])
        policy = VllmPolicy(settings, "m", RENDERER, retry=RetryPolicy(400, first=0.01, longest=0.05))
        stack.push_async_callback(policy.close)

        async def restart() -> int:
            lives = 0
            while not done.is_set():
                restarting.version, restarting.label, restarting.paused = 0, "default", False
                async with restarting.serving(port):
                    await asyncio.sleep(0.4)
                lives += 1
                await asyncio.sleep(0.05)
            return lives

        async def play(place: int) -> list[Generation]:
            made = []
            while not done.is_set():
                made.append(await call(policy, place, 20))
            return made

        restarts = asyncio.create_task(restart())
        playing = [asyncio.create_task(play(place)) for place in range(6)]
        modes = list(UpdateMode)
        async with asyncio.timeout(120):
            for version in range(1, 13):
                await policy.update_weights(weights(version), modes[version % 3])
                await asyncio.sleep(0.1)
            done.set()
            made = [each for task in playing for each in await task]
        assert await restarts > 2
        assert len(assert_exact(made)) > 5
