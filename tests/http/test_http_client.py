"""The HTTP client against servers that say exactly what a test wants, byte by byte."""

import asyncio
import ipaddress
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from rollwright.aio import timeout_queue
from rollwright.errors import ConfigError
from rollwright.http import (
    BrokenResponse,
    HoldsPassword,
    HttpClient,
    HttpFault,
    HttpResponse,
    TimedOut,
    Unreachable,
    Url,
)
from rollwright.http.connection import MAX_HEAD
from rollwright.http.url import Resolver

LONG = 60.0
"""Far longer than anything here takes."""

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"

Serve = Callable[["Peer"], Awaitable[None]]


class Peer:
    """The server's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        self.reader = reader
        self.writer = writer
        self.number = number
        """Of the connection, from 1."""

    async def request(self) -> tuple[str, bytes]:
        """The next request's head and body; raises when the client has gone."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = [line for line in head.split("\r\n") if line.lower().startswith("content-length:")]
        return head, await self.reader.readexactly(int(length[0].split(":")[1])) if length else b""

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def gone(self) -> bool:
        """Returns once the client has closed the connection."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True


class Server:
    def __init__(self) -> None:
        self.url = Url.parse("http://unknown")
        self.connections = 0
        self.open = 0
        self.heads: list[str] = []
        self.bodies: list[bytes] = []

    async def until(self, condition: Callable[["Server"], bool]) -> None:
        async with asyncio.timeout(LONG):
            while not condition(self):
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(
    serve: Serve, *, tls: ssl.SSLContext | None = None, path: str | None = None
) -> AsyncIterator[Server]:
    server = Server()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        server.open += 1
        try:
            await serve(Peer(reader, writer, server.connections))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            server.open -= 1
            writer.close()

    if path is not None:
        listener = await asyncio.start_unix_server(connected, path)
        server.url = Url.parse("http://store/x")
    else:
        listener = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
        port = listener.sockets[0].getsockname()[1]
        server.url = Url.parse(f"{'http' if tls is None else 'https'}://127.0.0.1:{port}/x")
    try:
        yield server
    finally:
        listener.close()


def answering(*answers: bytes, then_close: bool = False) -> Serve:
    """One of these for each request of a connection, and the last one for ever."""

    async def serve(peer: Peer) -> None:
        left = list(answers)
        while True:
            await peer.request()
            peer.send(left.pop(0) if len(left) > 1 else left[0])
            if then_close:
                return

    return serve


@asynccontextmanager
async def opened(headers: dict[str, str] | None = None, **options: Any) -> AsyncIterator[HttpClient]:
    client = HttpClient(headers or {}, **{"keep_alive": LONG, **options})
    try:
        yield client
    finally:
        await client.close()


async def ask(
    client: HttpClient, server: Server, method: str = "POST", body: bytes | None = b"q"
) -> HttpResponse:
    return await client.request(method, server.url, body, LONG)


# -- requests -------------------------------------------------------------------------------------------


async def test_a_request_says_what_it_must_and_nothing_else() -> None:
    seen: list[tuple[str, bytes]] = []

    async def serve(peer: Peer) -> None:
        while True:
            seen.append(await peer.request())
            peer.send(OK)

    async with serving(serve) as server, opened({"X-Mine": "1"}) as client:
        authority = server.url.authority
        await ask(client, server, "POST", b"\x00body")
        await ask(client, server, "GET", None)
        await ask(client, server, "POST", None)
    assert seen == [
        (f"POST /x HTTP/1.1\r\nHost: {authority}\r\nX-Mine: 1\r\nContent-Length: 5\r\n\r\n", b"\x00body"),
        (f"GET /x HTTP/1.1\r\nHost: {authority}\r\nX-Mine: 1\r\n\r\n", b""),
        (f"POST /x HTTP/1.1\r\nHost: {authority}\r\nX-Mine: 1\r\nContent-Length: 0\r\n\r\n", b""),
    ]


async def test_a_large_body_arrives_whole() -> None:
    body = bytes(range(256)) * 40_000
    received: list[bytes] = []

    async def serve(peer: Peer) -> None:
        received.append((await peer.request())[1])
        peer.send(OK)

    async with serving(serve) as server, opened() as client:
        assert (await ask(client, server, body=body)).status == 200
    assert received == [body]


@pytest.mark.parametrize(
    "headers",
    [
        {"X": "a\r\nY: b"},
        {"X": "a\nb"},
        {"X": "a\0"},
        {"X": "ä"},
        {"X Y": "1"},
        {"X:": "1"},
        {"": "1"},
        {"X\r\nY": "1"},
        {"Content-Length": "3"},
        {"transfer-encoding": "chunked"},
        {"Host": "elsewhere"},
        {"Connection": "close"},
    ],
)
def test_a_header_that_could_break_a_request_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="headers") as refusal:
        HttpClient(headers, keep_alive=1.0)
    assert len(str(refusal.value).splitlines()) == 1


# -- answers --------------------------------------------------------------------------------------------

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;note=x\r\nh\r\n1\r\ni\r\n0\r\nTrailer: x\r\n\r\n"
)
EARLY_HINTS = b"HTTP/1.1 103 Early Hints\r\nRetry-After: 7\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (OK, 200, b"hi"),
        (CHUNKED, 200, b"hi"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", 304, b""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + EARLY_HINTS + OK, 200, b"hi"),
        (b"HTTP/1.1 503 \r\nContent-Length: 2\r\n\r\nno", 503, b"no"),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi"),
    ],
    ids=["length", "chunks", "empty", "204", "304", "interim", "no reason", "1.0 kept"],
)
@pytest.mark.parametrize("piece", [1, 3, 10_000])
async def test_answers_are_read_however_they_are_cut_and_the_connection_is_kept(
    answer: bytes, status: int, body: bytes, piece: int
) -> None:
    async def serve(peer: Peer) -> None:
        while True:
            await peer.request()
            for start in range(0, len(answer), piece):
                peer.send(answer[start : start + piece])
                await asyncio.sleep(0)
                await asyncio.sleep(0)

    async with serving(serve) as server, opened() as client:
        for _ in range(3):
            got = await ask(client, server)
            assert (got.status, got.body) == (status, body)
            assert got.header("retry-after") is None  # that of an interim answer is not the answer's
        assert server.connections == 1


async def test_status_reason_and_headers_come_back() -> None:
    answer = b"HTTP/1.1 429 Too Many\r\nRetry-After:  3 \r\nX: \xe4\r\nx: 2\r\nContent-Length: 0\r\n\r\n"
    async with serving(answering(answer)) as server, opened() as client:
        got = await ask(client, server)
    assert (got.status, got.reason) == (429, "Too Many")
    assert (got.header("retry-after"), got.header("X"), got.header("Y")) == ("3", "ä", None)


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n"]
)
async def test_an_answer_may_end_with_its_connection(head: bytes) -> None:
    async with serving(answering(head + b"\r\nall of it", then_close=True)) as server, opened() as client:
        for number in (1, 2):
            assert (await ask(client, server)).body == b"all of it"
            assert server.connections == number


async def test_an_answer_to_head_has_no_body_whatever_it_says() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    async with serving(answering(head)) as server, opened() as client:
        got = await ask(client, server, "HEAD", None)
        assert (got.status, got.body, got.header("content-length")) == (200, b"", "1000")
        assert (await ask(client, server, "HEAD", None)).status == 200


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not an HTTP/1.1 answer"),
        (b"HTTP/1.1 2 OK\r\n\r\n", "not an HTTP/1.1 answer"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "not an HTTP/1.1 answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nhi!", "not an HTTP/1.1 answer"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "not an HTTP/1.1 answer",
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "not an HTTP/1.1 answer"),
        (
            b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n\x00",
            "not an HTTP/1.1 answer",
        ),
        (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nhi",
            r"compressed \(gzip\)",
        ),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * MAX_HEAD, "the headers are longer"),
        (b"HTTP/1.1 103 Hints\r\n\r\n" * (MAX_HEAD // 10), "the headers are longer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 200_000, "the answer is longer"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 200_000, "the answer is longer"),
    ],
)
async def test_what_is_not_a_sound_answer_is_told_as_broken(answer: bytes, why: str) -> None:
    async with serving(answering(answer)) as server, opened(max_answer=150_000) as client:
        for number in (1, 2):
            with pytest.raises(BrokenResponse, match=why):
                await ask(client, server)
            assert server.connections == number
        await server.until(lambda server: server.open == 0)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", Unreachable),
        (b"HTTP/1.1 200 O", Unreachable),
        (b"HTTP/1.1 200 OK\r\nContent-Len", Unreachable),
        (b"HTTP/1.1 100 Continue\r\n\r\n", Unreachable),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", BrokenResponse),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", BrokenResponse),
    ],
)
async def test_a_connection_that_ends_too_early_is_told_by_how_far_the_answer_was(
    answer: bytes, kind: type[HttpFault]
) -> None:
    async with serving(answering(answer, then_close=True)) as server, opened() as client:
        with pytest.raises(kind):
            await ask(client, server)


# -- kept connections -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        OK + OK,
        OK + b"HTTP/1.1 500 Not asked for\r\nContent-Length: 100\r\n\r\n",
        OK + b"rubbish",
    ],
    ids=["told to close", "1.0", "two answers", "one and a half", "rubbish"],
)
async def test_such_a_connection_is_not_used_again(answer: bytes) -> None:
    async with serving(answering(answer)) as server, opened() as client:
        for number in (1, 2, 3):
            got = await ask(client, server)
            assert (got.status, got.body) == (200, b"hi")
            assert server.connections == number
        await server.until(lambda server: server.open == 0)


async def test_bytes_that_nobody_asked_for_end_an_idle_connection() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.send(OK)
        await asyncio.sleep(0.05)
        peer.send(OK)
        await peer.gone()

    async with serving(serve) as server, opened() as client:
        await ask(client, server)
        await server.until(lambda server: server.open == 0)
        assert (await ask(client, server)).body == b"hi"
        assert server.connections == 2


async def test_an_answer_before_the_request_was_sent_ends_the_connection() -> None:
    async def serve(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await asyncio.sleep(LONG)  # reads no further

    async with serving(serve) as server, opened() as client:
        for number in (1, 2):
            assert (await ask(client, server, body=bytes(50_000_000))).status == 413
            assert server.connections == number


async def test_the_connection_used_last_is_used_first_and_the_others_grow_old() -> None:
    used: list[int] = []
    together = asyncio.Barrier(3)

    async def serve(peer: Peer) -> None:
        await peer.request()
        await together.wait()
        peer.send(OK)
        while True:
            await peer.request()
            used.append(peer.number)
            peer.send(OK)

    async with serving(serve) as server, opened(keep_alive=1.0) as client:
        await asyncio.gather(*(ask(client, server) for _ in range(3)))
        end = asyncio.get_running_loop().time() + LONG
        while server.open > 1 and asyncio.get_running_loop().time() < end:
            await ask(client, server)
            await asyncio.sleep(0.01)
        assert server.open == 1
        assert len(set(used)) == 1


async def test_an_idle_connection_is_closed_in_time_though_nobody_asks() -> None:
    async with serving(answering(OK)) as server, opened(keep_alive=0.05) as client:
        await ask(client, server)
        await server.until(lambda server: server.open == 0)
        await ask(client, server)
        assert server.connections == 2


async def test_connections_are_kept_apart_by_place() -> None:
    async with serving(answering(OK)) as one, serving(answering(OK)) as other, opened() as client:
        for server in (one, other, one, other):
            await ask(client, server)
        assert (one.connections, other.connections) == (1, 1)


async def test_a_server_that_closes_just_as_it_is_asked_is_told_as_unreachable() -> None:
    async def serve(peer: Peer) -> None:
        if peer.number == 1:
            await peer.request()
            peer.send(OK)
            await peer.request()  # and goes without a word
        else:
            await answering(OK)(peer)

    async with serving(serve) as server, opened() as client:
        await ask(client, server)
        with pytest.raises(Unreachable, match="Server disconnected"):
            await ask(client, server)
        assert (await ask(client, server)).status == 200


async def test_a_connection_that_the_server_closed_while_idle_is_not_used() -> None:
    async with serving(answering(OK, then_close=True)) as server, opened() as client:
        for _ in range(5):
            assert (await ask(client, server)).body == b"hi"
            await server.until(lambda server: server.open == 0)
            await asyncio.sleep(0.05)  # until the end of the connection has come here, too


# -- time and cancellation ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nha"]
)
async def test_a_request_that_is_too_slow_takes_its_connection_with_it(said: bytes) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.send(said)
        await peer.gone()

    async with serving(serve) as server, opened() as client:
        with pytest.raises(TimedOut, match=r"^no answer within 0\.1 s$"):
            await client.request("POST", server.url, b"q", 0.1)
        await server.until(lambda server: server.open == 0)


async def test_a_kept_connection_that_hangs_is_given_up_in_time_too() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.send(OK)
        await peer.request()
        await peer.gone()

    async with serving(serve) as server, opened() as client:
        await client.request("GET", server.url, None, 0.2)
        with pytest.raises(TimedOut):
            await client.request("GET", server.url, None, 0.2)
        assert server.connections == 1


async def test_a_request_that_was_answered_leaves_no_timeout_to_the_next_on_its_connection() -> None:
    asked = asyncio.Event()
    go_on = asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.send(OK)
        await peer.request()
        asked.set()
        await go_on.wait()
        peer.send(OK)

    async with serving(serve) as server, opened() as client:
        timeouts = timeout_queue(asyncio.get_running_loop(), LONG)
        await ask(client, server)
        assert len(timeouts) == 0
        second = asyncio.create_task(ask(client, server))
        await asked.wait()
        assert len(timeouts) == 1
        go_on.set()
        assert (await second).status == 200
        assert len(timeouts) == 0
        assert server.connections == 1


async def test_each_request_has_its_own_time_whatever_the_order() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.gone()

    async def late(client: HttpClient, server: Server, seconds: float) -> float:
        began = asyncio.get_running_loop().time()
        with pytest.raises(TimedOut, match=f"within {seconds:g} s"):
            await client.request("POST", server.url, b"q", seconds)
        return asyncio.get_running_loop().time() - began

    limits = [0.3, 0.1, 0.2, 0.4, 0.05]
    async with serving(serve) as server, opened() as client:
        waiting = asyncio.create_task(client.request("POST", server.url, b"q", LONG))
        took = await asyncio.gather(*(late(client, server, each) for each in limits))
        assert all(each >= limit for each, limit in zip(took, limits, strict=True))
        assert await late(client, server, 0.05) >= 0.05
        assert not waiting.done()
        waiting.cancel()


async def test_a_host_that_takes_no_connections_is_given_up_after_the_connect_limit() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        url = Url.parse(f"http://127.0.0.1:{full.getsockname()[1]}/")
        taken = []
        try:
            while True:  # until nobody more is let in
                taken.append(socket.create_connection(full.getsockname(), timeout=0.2))
        except TimeoutError:
            pass
        async with opened(connect_seconds=0.1) as client:
            with pytest.raises(TimedOut, match=r"within 0\.1 s"):
                await client.request("GET", url, None, LONG)
        async with opened(connect_seconds=LONG) as client:
            with pytest.raises(TimedOut, match=r"within 0\.2 s"):
                await client.request("GET", url, None, 0.2)
        for each in taken:
            each.close()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nha"])
async def test_a_cancelled_request_leaves_no_connection_behind(said: bytes) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        if peer.number == 1:
            peer.send(said)
            await peer.gone()
        else:
            peer.send(OK)
            await peer.gone()

    async with serving(serve) as server, opened() as client:
        task = asyncio.create_task(ask(client, server))
        await server.until(lambda server: server.connections == 1)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.until(lambda server: server.open == 0)
        assert (await ask(client, server)).body == b"hi"
        assert server.connections == 2


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_request_whose_answer_comes_as_it_is_cancelled_takes_nobody_elses_connection(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """The answer lies in the socket, whoever asked is cancelled, and another asks, all in one step."""
    answered: Queue[None] = Queue()

    def answer(peer: socket.socket) -> None:
        with peer, suppress(ConnectionError):
            while peer.recv(65536):
                peer.sendall(OK)
                answered.put(None)

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):  # at the end
            while True:
                Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    async def main(url: Url) -> None:
        loop = asyncio.get_running_loop()
        async with opened() as client:
            for _ in range(10):
                await client.request("GET", url, None, LONG)
                answered.get(timeout=LONG)
                first = asyncio.create_task(client.request("GET", url, None, LONG))
                gate = loop.create_future()

                async def after(gate: asyncio.Future[None] = gate) -> HttpResponse:
                    await gate
                    return await client.request("GET", url, None, LONG)

                second = asyncio.create_task(after())
                await asyncio.sleep(0)
                answered.get(timeout=LONG)
                gate.set_result(None)
                first.cancel()
                _, outcome = await asyncio.gather(first, second, return_exceptions=True)
                assert isinstance(outcome, HttpResponse), outcome
                answered.get(timeout=LONG)

    with socket.create_server(("127.0.0.1", 0)) as listener, asyncio.Runner(loop_factory=make_loop) as runner:
        accepting = Thread(target=accept, args=(listener,))
        accepting.start()
        try:
            runner.run(main(Url.parse(f"http://127.0.0.1:{listener.getsockname()[1]}/x")))
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


async def test_requests_cancelled_at_any_moment_never_give_an_answer_to_another() -> None:
    async def serve(peer: Peer) -> None:
        while True:
            _, body = await peer.request()
            await asyncio.sleep(0.001 * (body[0] % 3))
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async with serving(serve) as server, opened() as client:
        for round_number in range(5):
            tasks = {n: asyncio.create_task(ask(client, server, body=b"%d" % n)) for n in range(60)}
            for number, task in tasks.items():
                if number % 2:
                    if number % 4 == 1:
                        await asyncio.sleep(0.0005 * round_number)
                    task.cancel()
            await asyncio.wait(tasks.values())
            for number, task in tasks.items():
                if not task.cancelled():
                    assert task.result().body == b"%d" % number
        assert not any(task.cancelled() for number, task in tasks.items() if number % 2 == 0)
    await server.until(lambda server: server.open == 0)


async def test_closing_ends_what_is_under_way_and_whatever_is_asked_later() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.gone()

    async with serving(serve) as server, opened() as client:
        waiting = asyncio.create_task(ask(client, server))
        await server.until(lambda server: server.connections == 1)
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(Unreachable, match="closed"):
            await waiting
        with pytest.raises(Unreachable, match="closed"):
            await ask(client, server)
        await server.until(lambda server: server.open == 0)


# -- where to -------------------------------------------------------------------------------------------


async def test_nobody_there_is_told_with_the_place() -> None:
    async with opened() as client:
        with pytest.raises(Unreachable, match=r"^Cannot connect to host 127\.0\.0\.1:9: \S"):
            await client.request("GET", Url.parse("http://127.0.0.1:9/"), None, LONG)
    async with opened(socket_path="/nowhere/store.sock") as client:
        with pytest.raises(Unreachable, match=r"^Cannot connect to /nowhere/store\.sock: No such file"):
            await client.request("GET", Url.parse("http://store/"), None, LONG)


async def test_a_name_is_looked_up_once_for_all_and_an_address_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[str] = []

    async def look(host: str, port: int, **_: Any) -> list[Any]:
        looks.append(host)
        await asyncio.sleep(0.01)
        if len(looks) == 1:
            raise socket.gaierror(socket.EAI_AGAIN, "not now")
        return [(0, 0, 0, "", ("127.0.0.9", port)), (0, 0, 0, "", ("::9", port, 0, 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look)
    names = Resolver()
    with pytest.raises(socket.gaierror):
        await names.addresses("engine.test", 80)
    await asyncio.sleep(0.01)
    found = await asyncio.gather(*(names.addresses("engine.test", 80) for _ in range(20)))
    assert found == [["127.0.0.9", "::9"]] * 20
    assert await names.addresses("engine.test", 81) == ["127.0.0.9", "::9"]
    assert looks == ["engine.test"] * 2
    assert await names.addresses("127.0.0.1", 80) == ["127.0.0.1"]
    assert await names.addresses("::1", 80) == ["::1"]
    assert looks == ["engine.test"] * 2


async def test_the_next_address_is_tried_when_one_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def addresses(_: Resolver, host: str, port: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.1"]

    monkeypatch.setattr(Resolver, "addresses", addresses)
    async with serving(answering(OK)) as server, opened() as client:
        named = Url.parse(f"http://engine.test:{server.url.port}/x")
        assert (await client.request("GET", named, None, LONG)).body == b"hi"


async def test_requests_go_through_a_unix_socket() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/s"
        async with serving(answering(OK), path=path) as server, opened(socket_path=path) as client:
            for _ in range(3):
                assert (await ask(client, server)).body == b"hi"
            assert server.connections == 1


# -- TLS ------------------------------------------------------------------------------------------------


def certificate(folder: Path, address: str) -> ssl.SSLContext:
    """A server's context with a certificate for that address, in `folder / "cert.pem"`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


async def test_tls_with_a_certificate_that_is_trusted(tmp_path: Path) -> None:
    context = certificate(tmp_path, "127.0.0.1")
    trusting = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    big = b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + b"x" * 300_000
    async with serving(answering(big), tls=context) as server, opened(tls=trusting) as client:
        for _ in range(3):
            assert (await ask(client, server, body=bytes(300_000))).body == b"x" * 300_000
        assert server.connections == 1


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1"], ids=["unknown issuer", "another's name"])
async def test_tls_with_a_certificate_that_proves_nothing_is_refused(tmp_path: Path, address: str) -> None:
    context = certificate(tmp_path, address)
    trusting = (
        ssl.create_default_context(cafile=str(tmp_path / "cert.pem")) if address == "10.0.0.1" else None
    )
    async with serving(answering(OK), tls=context) as server, opened(tls=trusting) as client:
        with pytest.raises(Unreachable, match="certificate verify failed"):
            await ask(client, server)


async def test_tls_to_a_server_without_it_is_told_as_unreachable() -> None:
    async def serve(peer: Peer) -> None:
        await peer.reader.read(10)
        peer.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    async with serving(serve) as server, opened() as client:
        secure = Url.parse(str(server.url).replace("http:", "https:"))
        with pytest.raises(Unreachable, match="Cannot connect to host"):
            await client.request("GET", secure, None, LONG)


# -- URLs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "authority", "target", "port"),
    [
        ("http://host", "host", "/", 80),
        ("HTTP://Host:80/a/b?c=d&e#f", "host", "/a/b?c=d&e", 80),
        ("https://host:8443/v1", "host:8443", "/v1", 8443),
        ("https://host:443", "host", "/", 443),
        ("http://[::1]:9/x", "[::1]:9", "/x", 9),
        ("http://h/ä b/%41%zz?q=ü?", "h", "/%C3%A4%20b/%41%25zz?q=%C3%BC?", 80),
        ("http://bücher.example/", "xn--bcher-kva.example", "/", 80),
    ],
)
def test_a_url_is_taken_apart_and_made_fit_for_a_request(
    text: str, authority: str, target: str, port: int
) -> None:
    url = Url.parse(text)
    assert (url.authority, url.target, url.port) == (authority, target, port)
    assert Url.parse(str(url)) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host:80",
        "ftp://host",
        "http://",
        "http:///path",
        "http://host:port/",
        "http://host:99999/",
        "http://ho st/",
        "http://host\r\nX: y/",
        " http://host",
        "http://host/a\nb",
        "http://ho\\st/",
        "http://[::1/",
    ],
)
def test_what_is_not_a_url_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Url.parse(text)


@pytest.mark.parametrize("text", ["http://me@host/", "http://me:pw@host/", "http://:pw@host/"])
def test_a_url_with_a_password_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(HoldsPassword) as refusal:
        Url.parse(text)
    assert "pw" not in str(refusal.value)


@given(st.text(max_size=30))
def test_no_text_becomes_a_url_that_could_break_a_request(text: str) -> None:
    try:
        url = Url.parse("http://host/" + text)
    except ValueError:
        assert not (text.isascii() and text.isalnum()), "a plain path is a URL"
        return
    sent = url.target + url.authority
    assert sent.isascii()
    assert not set(sent) & set(" \r\n\t\0")
    assert Url.parse(str(url)) == url
