"""The simulated server, as a real process behind a real socket."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from rollwright.errors import ConfigError
from rollwright.simulation.server import InjectedFault, ServerOptions, SimulatedServer
from rollwright.simulation.server_process import RunningServer, simulated_server

CHAT = {"model": "m", "messages": [{"role": "user", "content": "go ☃"}]}


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def ask(
    session: aiohttp.ClientSession, server: RunningServer, body: Any = CHAT, path: str = "/chat/completions"
) -> tuple[int, Any]:
    async with session.post(server.base_url + path, json=body) as response:
        return response.status, await response.json()


async def stats(session: aiohttp.ClientSession, server: RunningServer) -> Any:
    async with session.get(server.stats_url) as response:
        return await response.json()


async def raw(server: RunningServer, *pieces: bytes) -> bytes:
    """What the server says to these bytes, sent piece by piece, until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0.002)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_it_answers_like_an_openai_server(session: aiohttp.ClientSession) -> None:
    async with simulated_server(filler=30, actions=("Up",)) as server:
        status, chat = await ask(session, server)
        assert status == 200
        assert chat["object"] == "chat.completion"
        assert chat["model"] == "m"
        text = chat["choices"][0]["message"]["content"]
        assert text.endswith("<answer>Up</answer>")
        assert chat["choices"][0]["finish_reason"] == "stop"
        tokens = 30 + len("<answer>Up</answer>")
        assert len(text) == tokens
        assert chat["usage"] == {"prompt_tokens": 6, "completion_tokens": tokens, "total_tokens": 6 + tokens}

        status, cut = await ask(session, server, {"prompt": "go", "max_tokens": 10}, "/completions")
        assert (status, cut["object"]) == (200, "text_completion")
        assert (cut["choices"][0]["text"], cut["choices"][0]["finish_reason"]) == (text[:10], "length")

        for path in ("/health", "/v1/models"):
            async with session.get(f"http://127.0.0.1:{server.port}{path}") as response:
                assert response.status == 200
        assert await stats(session, server) == {"requests": 2, "outcomes": {"answer": 2}}


async def test_bad_requests_are_refused_with_a_reason(session: aiohttp.ClientSession) -> None:
    async with simulated_server() as server:
        for body, why in (
            ({"messages": []}, "length >= 1"),
            ({"prompt": "x"}, "missing required field `messages`"),
            ({**CHAT, "max_tokens": 0}, ">= 1"),
            ({**CHAT, "stream": True}, "streaming is not supported"),
        ):
            status, answer = await ask(session, server, body)
            assert status == 400
            assert why in answer["error"]["message"]
        assert (await ask(session, server, path="/embeddings"))[0] == 404
        async with session.get(server.base_url + "/chat/completions") as response:
            assert response.status == 405
        assert b" 411 " in await raw(
            server, b"POST /v1/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        assert b" 400 " in await raw(server, b"nonsense\r\n\r\n")


@pytest.mark.parametrize("size", [10, 100_000], ids=["small", "more than is read ahead"])
async def test_pipelined_and_partial_requests_are_answered_in_order(size: int) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * size}]}).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    last = request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    stream = request * 9 + last
    pieces = [stream[start : start + 7 * size] for start in range(0, len(stream), 7 * size)]
    async with simulated_server(latency=0.01) as server:
        answers = await raw(server, *pieces)
    numbers = [int(number) for number in re.findall(rb'"simulated-(\d+)"', answers)]
    assert numbers == list(range(1, 11))


async def test_slots_limit_how_many_are_served_at_a_time(session: aiohttp.ClientSession) -> None:
    clock = asyncio.get_running_loop().time
    async with simulated_server(latency=0.05, latency_sigma=0, slots=2) as server:
        start = clock()
        await asyncio.gather(*(ask(session, server) for _ in range(8)))
        assert clock() - start >= 4 * 0.05


async def test_a_client_that_goes_away_frees_its_slot(session: aiohttp.ClientSession) -> None:
    options = {"slots": 1, "hang_rate": 0.5, "seed": seed_of(InjectedFault.HANG, None)}
    async with simulated_server(**options) as server:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await ask(session, server)
        async with asyncio.timeout(20):
            assert (await ask(session, server))[0] == 200


def seed_of(*fates: InjectedFault | None) -> int:
    """A seed with which the first requests meet these fates, at a hang rate of 0.5."""
    for seed in range(1000):
        server = SimulatedServer(ServerOptions(hang_rate=0.5, seed=seed))
        if [server.draw_outcome(number + 1)[0] for number in range(len(fates))] == list(fates):
            return seed
    raise AssertionError(f"no seed gives {fates}")


async def test_each_fault_shows_as_it_should(session: aiohttp.ClientSession) -> None:
    async with (
        simulated_server(rate_limit_rate=1, retry_after=7) as server,
        session.post(server.base_url + "/chat/completions", json=CHAT) as response,
    ):
        assert (response.status, response.headers["Retry-After"]) == (429, "7")
    async with simulated_server(error_rate=1) as server:
        assert (await ask(session, server))[0] == 500
    async with (
        simulated_server(truncate_rate=1) as server,
        session.post(server.base_url + "/chat/completions", json=CHAT) as response,
    ):
        assert response.status == 200
        with pytest.raises(json.JSONDecodeError):
            json.loads(await response.read())
    async with simulated_server(drop_rate=1) as server:
        with pytest.raises(aiohttp.ClientError):
            await ask(session, server)
    async with simulated_server(hang_rate=1) as server:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await ask(session, server)
        assert await stats(session, server) == {"requests": 1, "outcomes": {"hang": 1}}


def test_faults_come_at_their_rates_and_by_the_number_of_the_request() -> None:
    options = ServerOptions(rate_limit_rate=0.1, error_rate=0.2, hang_rate=0.3, seed=5)
    fates = [SimulatedServer(options).draw_outcome(number)[0] for number in range(4000)]
    assert fates == [SimulatedServer(options).draw_outcome(number)[0] for number in range(4000)]
    for fault, rate in (
        (InjectedFault.RATE_LIMIT, 0.1),
        (InjectedFault.ERROR, 0.2),
        (InjectedFault.HANG, 0.3),
        (None, 0.4),
    ):
        assert fates.count(fault) / len(fates) == pytest.approx(rate, abs=0.03)


def test_actions_are_drawn_evenly() -> None:
    server = SimulatedServer(ServerOptions())
    texts = [server.draw_outcome(number)[1] for number in range(4000)]
    for action in ("Left", "Down", "Right", "Up"):
        assert texts.count(f"<answer>{action}</answer>") == pytest.approx(1000, abs=120)


@pytest.mark.parametrize(
    "options", [{"error_rate": 0.6, "hang_rate": 0.6}, {"drop_rate": -0.1}, {"latency": -1}, {"actions": ()}]
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerOptions(**options)


async def test_the_command_refuses_them_in_one_line() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rollwright.simulation.server",
        "--error-rate=2",
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert said.decode().splitlines() == ["the rates of all faults together must be between 0 and 1"]


async def test_the_process_is_stopped_when_the_block_ends() -> None:
    async with simulated_server() as server:
        os.kill(server.pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


async def test_the_process_does_not_outlive_a_parent_that_is_killed() -> None:
    program = """
import asyncio, sys
from rollwright.simulation.server_process import simulated_server
async def main():
    async with simulated_server() as server:
        print(server.port, flush=True)
        await asyncio.sleep(3600)
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    port = int(await parent.stdout.readline())
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    parent.send_signal(signal.SIGKILL)
    await parent.communicate()
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:
                break
            writer.close()
            await asyncio.sleep(0.02)
