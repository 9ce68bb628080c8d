"""A request that is sent again gets the recorded answer; one that only looks the same is a sample of its own."""

import asyncio
import json
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from rollwright.engines.base import Sampling
from rollwright.gateway import Gateway
from rollwright.simulation.lengths import FixedLength
from rollwright.trajectory import samples

CHAT: Any = {"model": "m", "messages": [{"role": "user", "content": "one"}]}


class Caller:
    """Sends the same request as often as it is told to."""

    def __init__(self, played: Any, client: aiohttp.ClientSession) -> None:
        self._url = f"{played.access.base_url}/chat/completions"
        self._key = {"Authorization": f"Bearer {played.access.api_key}"}
        self._client = client

    async def __call__(self, body: Any = CHAT, **headers: str) -> str:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._client.post(self._url, json=body, headers={**self._key, **given}) as answer:
            assert answer.status == 200, await answer.text()
            content = await answer.json()
            return str(content["id"])


@pytest.fixture
def slow(clients: Any) -> Any:
    return clients.engine(tokens_per_second=200.0)


async def test_a_request_that_the_client_marks_as_repeated_is_not_sampled_again(
    played: Any, engine: Any
) -> None:
    async with aiohttp.ClientSession() as client:
        call = Caller(played, client)
        first = await call(x_stainless_retry_count="0")
        assert await call(x_stainless_retry_count="1") == first
        assert await call(x_stainless_retry_count="0") != first
    assert len(engine.made) == len(played.trajectory.turns) == 2
    assert played.trajectory.metrics["gateway_replayed"] == 1


async def test_an_idempotency_key_names_one_call(played: Any, engine: Any) -> None:
    async with aiohttp.ClientSession() as client:
        call = Caller(played, client)
        first = await call(idempotency_key="a")
        assert await call(idempotency_key="a") == first
        assert await call(idempotency_key="b") != first
        other = {**CHAT, "messages": [{"role": "user", "content": "two"}]}
        assert await call(other, idempotency_key="a") != first
    assert len(engine.made) == 3


async def test_an_answer_that_reached_nobody_is_told_when_it_is_asked_for_again(
    clients: Any, gateway: Gateway, slow: Any
) -> None:
    played = clients.rollout(gateway, slow, "ro-1")
    async with aiohttp.ClientSession() as client:
        lost = asyncio.create_task(Caller(played, client)())
        while not slow.usage().running:
            await asyncio.sleep(0.005)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        while not played.trajectory.turns:  # it is recorded all the same
            await asyncio.sleep(0.01)
        call = Caller(played, client)
        again = await call()
        assert again == "chatcmpl-at-ro-1-0"
        assert await call() != again
    assert len(slow.made) == len(played.trajectory.turns) == 2


async def test_a_repetition_joins_the_call_that_is_still_being_sampled(
    clients: Any, gateway: Gateway, slow: Any
) -> None:
    played = clients.rollout(gateway, slow, "ro-1")
    async with aiohttp.ClientSession() as client:
        call = Caller(played, client)
        first = asyncio.create_task(call())
        while not slow.usage().running:
            await asyncio.sleep(0.005)
        assert await call(x_stainless_retry_count="1") == await first
    assert len(slow.made) == 1


async def test_an_sdk_that_times_out_and_repeats_pays_once(clients: Any, gateway: Gateway) -> None:
    slow = clients.engine(tokens_per_second=60.0)
    played = clients.rollout(gateway, slow, "ro-1")
    async with clients.openai(played.access, timeout=0.2, max_retries=20) as client:
        answer = await client.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == played.trajectory.turns[0].text
    assert slow.usage().requests == len(played.trajectory.turns) == 1
    assert played.trajectory.metrics["gateway_replayed"] >= 1


async def begin_to_read(url: str, headers: Mapping[str, str], body: bytes) -> None:
    """Posts, and leaves with the first bytes of the answer; the machine takes in hardly more of it."""
    place, loop = urlsplit(url), asyncio.get_running_loop()
    lines = [f"POST {place.path} HTTP/1.1", f"Host: {place.netloc}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, (place.hostname, place.port))
        await loop.sock_sendall(client, "\r\n".join([*lines, "", ""]).encode() + body)
        assert await loop.sock_recv(client, 1000)


async def test_a_stream_that_broke_off_is_told_again(clients: Any, gateway: Gateway) -> None:
    long = clients.engine(lengths=FixedLength(12_000_000), tokens_per_second=1e9)  # more than buffers hold
    sampling = Sampling(max_tokens=13_000_000)
    played = clients.rollout(gateway, long, "ro-1", sequence_length=20_000_000, sampling=sampling)
    url = f"{played.access.base_url}/chat/completions"
    headers = {"Authorization": f"Bearer {played.access.api_key}"}
    body = json.dumps({**CHAT, "stream": True}).encode()
    await begin_to_read(url, headers, body)
    while not any(call.abandoned for call in played.recorder._calls._all()):
        await asyncio.sleep(0.01)  # until the gateway has noticed: before that it would be a call of its own
    async with aiohttp.ClientSession() as client, client.post(url, data=body, headers=headers) as answer:
        assert (await answer.read()).rstrip().endswith(b"data: [DONE]")
    assert len(long.made) == 1
    assert played.trajectory.metrics == {"gateway_replayed": 1.0}


async def test_a_stream_that_broke_off_and_was_not_asked_for_again_is_not_trained(
    clients: Any, gateway: Gateway
) -> None:
    long = clients.engine(lengths=FixedLength(12_000_000), tokens_per_second=1e9)
    sampling = Sampling(max_tokens=13_000_000)
    played = clients.rollout(gateway, long, "ro-1", sequence_length=20_000_000, sampling=sampling)
    body = json.dumps({**CHAT, "stream": True}).encode()
    key = {"Authorization": f"Bearer {played.access.api_key}"}
    await begin_to_read(f"{played.access.base_url}/chat/completions", key, body)
    while not any(call.abandoned for call in played.recorder._calls._all()):
        await asyncio.sleep(0.01)
    assert (await played.close()).turns[0].filtered == "undelivered"


async def lose_one(played: Any, client: aiohttp.ClientSession, slow: Any) -> None:
    """A call whose client leaves before it is answered; the turn is recorded all the same."""
    recorded = len(played.trajectory.turns)
    lost = asyncio.create_task(Caller(played, client)())
    while not slow.usage().running:
        await asyncio.sleep(0.005)
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    while len(played.trajectory.turns) == recorded:
        await asyncio.sleep(0.01)


async def test_a_turn_whose_answer_reached_nobody_is_counted_and_not_trained(
    clients: Any, gateway: Gateway, slow: Any
) -> None:
    played = clients.rollout(gateway, slow, "ro-1")
    other = {**CHAT, "messages": [{"role": "user", "content": "two"}]}
    async with aiohttp.ClientSession() as client:
        await lose_one(played, client, slow)
        await Caller(played, client)(other)
    await played.close()
    assert played.trajectory.metrics == {"gateway_undelivered": 1.0}
    lost, heard = played.trajectory.turns
    assert (lost.filtered, heard.filtered) == ("undelivered", None)
    assert [any(sample.mask) for sample in samples(played.trajectory)] == [False, True]
    assert played.trajectory.not_trainable is None


async def test_an_answer_that_came_with_the_repetition_is_trained(
    clients: Any, gateway: Gateway, slow: Any
) -> None:
    played = clients.rollout(gateway, slow, "ro-1")
    async with aiohttp.ClientSession() as client:
        await lose_one(played, client, slow)
        await Caller(played, client)()
    await played.close()
    assert played.trajectory.metrics == {"gateway_replayed": 1.0}
    (only,) = played.trajectory.turns
    assert only.filtered is None


async def test_a_client_that_goes_on_from_an_answer_has_got_it(
    clients: Any, gateway: Gateway, slow: Any
) -> None:
    played = clients.rollout(gateway, slow, "ro-1")
    async with aiohttp.ClientSession() as client:
        await lose_one(played, client, slow)
        said = {"role": "assistant", "content": played.trajectory.turns[0].text}
        more = {"role": "user", "content": "two"}
        await Caller(played, client)({**CHAT, "messages": [*CHAT["messages"], said, more]})
    await played.close()
    assert [turn.filtered for turn in played.trajectory.turns] == [None, None]
    assert played.trajectory.metrics == {}


async def test_nothing_is_trained_where_no_answer_arrived(clients: Any, gateway: Gateway, slow: Any) -> None:
    played = clients.rollout(gateway, slow, "ro-1")
    async with aiohttp.ClientSession() as client:
        await lose_one(played, client, slow)
    assert (await played.close()).not_trainable == "no answer reached the agent"
