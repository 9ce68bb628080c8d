"""What strangers, and clients that misbehave, cost a server: little, and not for long."""

import asyncio
import resource
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from rollwright.http.server import Listener, listening_socket
from rollwright.http.server_limits import ServerLimits, Stage

PATIENCE = 30.0
"""Seconds after which a test gives up; nothing waits for them to pass."""

QUICK = ServerLimits(
    head_seconds=0.2, body_seconds=0.2, answer_seconds=0.2, linger_seconds=0.2, sweep_seconds=0.05
)
KEY = b"Authorization: Bearer right\r\n"


class App:
    """Asks for a key, reads the body, and answers with so many bytes as the path says."""

    def __init__(self) -> None:
        self.read = 0
        """Bytes of bodies that it has taken."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status, content = 200, b"x" * int(scope["path"][1:] or 2)
        if (b"authorization", b"Bearer right") not in scope["headers"]:
            status, content = 401, b"no"
        else:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                self.read += len(message["body"])
                more = message["more_body"]
        headers = [(b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


class Served:
    def __init__(self, app: App, listener: Listener, port: int) -> None:
        self.app = app
        self.connections = listener.connections
        self._port = port

    async def connect(self, sent: bytes = b"", **options: Any) -> "Client":
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, **options)
        writer.write(sent)
        return Client(reader, writer)

    async def is_well(self) -> bool:
        """Whether an honest client is served."""
        client = await self.connect(b"POST / HTTP/1.1\r\n" + KEY + b"Content-Length: 2\r\n\r\n{}")
        return (await client.head()).startswith(b"HTTP/1.1 200")

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not true():
                await asyncio.sleep(0.01)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def head(self) -> bytes:
        async with asyncio.timeout(PATIENCE):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        async with asyncio.timeout(PATIENCE):
            with suppress(ConnectionError):
                return await self.reader.read()
        return b""

    async def trickle(self, data: bytes) -> bool:
        """Sends the same again and again; whether the server had enough of it."""
        async with asyncio.timeout(PATIENCE):
            with suppress(ConnectionError):
                while not self.reader.at_eof():
                    self.writer.write(data)
                    await self.writer.drain()
                    await asyncio.sleep(0.02)
        return True


@asynccontextmanager
async def serving(limits: ServerLimits) -> AsyncIterator[Served]:
    app = App()
    listener = Listener(app, limits)
    bound = listening_socket("127.0.0.1", 0)
    served = Served(app, listener, bound.getsockname()[1])
    running = asyncio.create_task(listener.serve([bound]))
    try:
        yield served
    finally:
        listener.stop()
        await running


async def test_a_request_is_refused_before_its_body_is_read_and_the_connection_ends() -> None:
    async with serving(QUICK) as served:
        for length in (b"Content-Length: 31457280\r\n", b"Transfer-Encoding: chunked\r\n"):
            client = await served.connect(b"POST / HTTP/1.1\r\n" + length + b"\r\n")
            assert (await client.head()).startswith(b"HTTP/1.1 401")
            assert await client.rest() == b"no"
        await served.until(lambda: len(served.connections) == 0)
        assert served.app.read == 0


async def test_a_client_that_sends_on_after_its_refusal_gets_the_answer_and_is_then_closed() -> None:
    async with serving(QUICK) as served:
        client = await served.connect(b"POST / HTTP/1.1\r\nContent-Length: 31457280\r\n\r\n")
        assert await client.trickle(b"x" * 10_000)
        assert served.app.read == 0
        await served.until(lambda: len(served.connections) == 0)


async def test_what_a_refused_client_sends_on_is_bounded_in_bytes_too() -> None:
    limits = ServerLimits(linger_seconds=PATIENCE, linger_bytes=100_000)
    async with serving(limits) as served:
        client = await served.connect(b"POST / HTTP/1.1\r\nContent-Length: 31457280\r\n\r\n")
        assert await client.trickle(b"x" * 50_000)
        await served.until(lambda: served.connections.closed[Stage.LINGER.value] == 1)


async def test_a_client_that_waits_for_leave_to_send_is_refused_without_it() -> None:
    async with serving(QUICK) as served:
        request = b"POST / HTTP/1.1\r\nContent-Length: 5\r\nExpect: 100-continue\r\n"
        client = await served.connect(request + b"\r\n")
        assert (await client.head()).startswith(b"HTTP/1.1 401")
        client = await served.connect(request + KEY + b"\r\n")
        assert (await client.head()).startswith(b"HTTP/1.1 100")
        client.writer.write(b"hello")
        assert (await client.head()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nx: y"])
async def test_a_connection_without_a_whole_request_ends(sent: bytes) -> None:
    async with serving(QUICK) as served:
        client = await served.connect(sent)
        assert await client.rest() == b""
        await served.until(lambda: served.connections.closed[Stage.HEAD.value] == 1)


async def test_headers_that_trickle_in_end_the_connection() -> None:
    async with serving(QUICK) as served:
        client = await served.connect(b"POST / HTTP/1.1\r\n")
        assert await client.trickle(b"x: y\r\n")
        await served.until(lambda: served.connections.closed[Stage.HEAD.value] == 1)


@pytest.mark.parametrize("length", [b"Content-Length: 1000000\r\n", b"Transfer-Encoding: chunked\r\n"])
async def test_a_body_that_trickles_in_ends_the_connection(length: bytes) -> None:
    async with serving(QUICK) as served:
        client = await served.connect(b"POST / HTTP/1.1\r\n" + KEY + length + b"\r\n")
        assert await client.trickle(b"1\r\nx\r\n")
        await served.until(lambda: served.connections.closed[Stage.BODY.value] == 1)


async def test_a_body_that_comes_at_its_own_pace_is_waited_for() -> None:
    """Ten times the time limit without a pause, but fast enough for what it is."""
    limits = ServerLimits(body_seconds=0.3, bytes_per_second=10_000, sweep_seconds=0.02)
    async with serving(limits) as served:
        client = await served.connect(b"POST / HTTP/1.1\r\n" + KEY + b"Content-Length: 100000\r\n\r\n")
        for _ in range(10):
            client.writer.write(b"x" * 10_000)
            await asyncio.sleep(0.05)
        assert (await client.head()).startswith(b"HTTP/1.1 200")


async def test_a_client_that_never_takes_its_answer_is_closed() -> None:
    async with serving(QUICK) as served:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(plain, ("127.0.0.1", served._port))
        await loop.sock_sendall(plain, b"POST /20000000 HTTP/1.1\r\n" + KEY + b"Content-Length: 0\r\n\r\n")
        await served.until(lambda: served.connections.closed[Stage.WORK.value] == 1)
        plain.close()


async def test_unread_answers_are_bounded_all_together() -> None:
    limits = ServerLimits(unread_bytes=30_000_000, sweep_seconds=0.05)
    async with serving(limits) as served:
        request = b"POST /20000000 HTTP/1.1\r\n" + KEY + b"Content-Length: 0\r\n\r\n"
        clients = [await served.connect(request, limit=1024) for _ in range(4)]
        await served.until(lambda: served.connections.closed.total() >= 2)
        assert await served.is_well()
        for client in clients:
            client.writer.transport.abort()


async def test_half_open_connections_keep_nobody_out() -> None:
    """Five times as many as there are places, and the honest client comes last."""
    async with serving(ServerLimits(connections=20)) as served:
        held = [await served.connect(b"POST / HTTP/1.1\r\n") for _ in range(100)]
        assert await served.is_well()
        assert len(served.connections) <= 20
        assert served.connections.closed["no place left"] >= 80
        for client in held:
            client.writer.close()


async def test_idle_connections_give_up_their_places_the_oldest_first() -> None:
    async with serving(ServerLimits(connections=5)) as served:
        request = b"POST / HTTP/1.1\r\n" + KEY + b"Content-Length: 0\r\n\r\n"
        clients = []
        for _ in range(8):
            clients.append(await served.connect(request))
            await clients[-1].head()
        for client in clients[:3]:
            assert await client.rest() == b"xx"  # closed by the server
        for client in clients[3:]:
            client.writer.write(request)
            assert (await client.head()).endswith(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")


async def test_a_connection_beyond_those_at_work_is_refused_at_once() -> None:
    async with serving(ServerLimits(connections=3)) as served:
        waiting = b"POST / HTTP/1.1\r\n" + KEY + b"Content-Length: 10\r\n\r\n12345"
        held = [await served.connect(waiting) for _ in range(3)]
        await served.until(lambda: served.app.read == 15)
        client = await served.connect()
        assert b"503" in await client.rest()
        for client in held:
            client.writer.write(b"67890")
            assert (await client.head()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST / HTTP/1.1\r\n" + b"x: y\r\n" * 200 + b"\r\n",
        b"POST / HTTP/1.1\r\nx: " + b"y" * 100_000,
        b"POST /" + b"1" * 100_000,
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["many headers", "a long header", "a long path", "two lengths", "minus", "overflow", "TLS"],
)
async def test_what_is_no_request_is_refused_and_the_connection_ends(request_bytes: bytes) -> None:
    async with serving(QUICK) as served:
        client = await served.connect(request_bytes)
        assert (await client.rest()).startswith(b"HTTP/1.1 4")
        assert await served.is_well()


@pytest.mark.parametrize("trailer", [b"x: y\r\n" * 500, b"x: " + b"y" * 500_000])
async def test_what_follows_a_body_in_chunks_is_bounded(trailer: bytes) -> None:
    async with serving(QUICK) as served:
        start = b"POST / HTTP/1.1\r\n" + KEY + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
        client = await served.connect(start + trailer)
        assert b"HTTP/1.1 431" in await client.rest()
        assert await served.is_well()


async def test_a_body_in_chunks_of_one_byte_is_read() -> None:
    async with serving(QUICK) as served:
        start = b"POST / HTTP/1.1\r\n" + KEY + b"Transfer-Encoding: chunked\r\n\r\n"
        client = await served.connect(start + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n")
        assert (await client.head()).startswith(b"HTTP/1.1 200")
        assert served.app.read == 50_000


async def test_an_answer_without_a_body_is_sent_too() -> None:
    async with serving(QUICK) as served:
        client = await served.connect(b"HEAD / HTTP/1.1\r\n" + KEY + b"\r\n")
        assert (await client.head()).startswith(b"HTTP/1.1 200")


async def test_a_few_requests_may_be_sent_ahead_and_many_may_not() -> None:
    request = b"POST / HTTP/1.1\r\n" + KEY + b"Content-Length: 2\r\n\r\n{}"
    async with serving(QUICK) as served:
        client = await served.connect(request * 5)
        for _ in range(5):
            assert (await client.head()).endswith(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
        client = await served.connect(request * 2000)
        assert b"HTTP/1.1 400" in await client.rest()
        assert await served.is_well()


async def test_the_time_in_which_the_server_was_busy_is_not_held_against_its_clients() -> None:
    async with serving(QUICK) as served:
        client = await served.connect(b"POST / HTTP/1.1\r\n" + KEY)
        await served.until(lambda: len(served.connections) == 1)
        loop = asyncio.get_running_loop()
        served.connections.sweep(loop.time())
        served.connections.sweep(loop.time() + 1000.0)
        client.writer.write(b"Content-Length: 0\r\n\r\n")
        assert (await client.head()).startswith(b"HTTP/1.1 200")


def test_the_number_of_connections_leaves_file_handles_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for handles, expected in (
        (1024, 512),
        (20, 10),
        (4, 8),
        (10**6, 10_000),
        (resource.RLIM_INFINITY, 10_000),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, handles=handles: (handles, handles))
        assert ServerLimits().most_connections == expected


def test_a_server_with_few_file_handles_serves_beside_more_half_open_connections_than_it_has() -> None:
    handles = 100

    def fewer_handles() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (handles, handles))

    words = [sys.executable, "-m", "rollwright", "serve", "--store", "memory", "--port", "0"]
    with subprocess.Popen(words, preexec_fn=fewer_handles, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        place = process.stdout.readline().split("http://")[1].strip()
        host, _, port = place.partition(":")
        held = []
        try:
            for _ in range(2 * handles):
                held.append(socket.create_connection((host, int(port)), timeout=PATIENCE))
                held[-1].sendall(b"POST / HTTP/1.1\r\nx: ")
            request = urllib.request.Request(
                f"http://{place}/v1/statistics", b"{}", {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                assert answer.status == 200
        finally:
            for each in held:
                each.close()
            process.terminate()
        process.wait(PATIENCE)
