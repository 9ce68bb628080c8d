"""However much an engine sends, no more is taken than an answer to what was asked can have."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from rollwright.engines import EngineError, Prompt, Sampling
from rollwright.engines.llama_cpp import LlamaCppPolicy
from rollwright.engines.openai import OpenAIPolicy
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.engines.settings import EngineServersConfig, OpenAIPolicyConfig
from rollwright.engines.sglang import SglangPolicy
from rollwright.engines.vllm import VllmPolicy
from rollwright.http.retry import RetryPolicy
from rollwright.tools.result import ToolFailure
from rollwright.tools.search import HttpSearch
from rollwright.trajectory import Message, token_ids

BLOCK = b"x" * 65536
ENOUGH = 96 * 1024 * 1024
"""Bytes after which the server stops by itself: above every limit, the buffers of both sides included."""

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

FLOODS: dict[str, tuple[bytes, bytes]] = {
    "endless body": (OK + b"\r\n", BLOCK),
    "endless chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"%x\r\n%b\r\n" % (len(BLOCK), BLOCK)),
    "tiny chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 10_000),
    "endless chunk extension": (OK + b"Transfer-Encoding: chunked\r\n\r\n1;a=", BLOCK),
    "huge length": (OK + b"Content-Length: 99999999999\r\n\r\n", BLOCK),
    "endless headers": (OK, b"X-Header: " + b"y" * 4096 + b"\r\n"),
    "one endless header": (OK + b"X-Header: ", BLOCK),
    "endless trailers": (
        OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n",
        b"X-Trailer: " + b"y" * 4096 + b"\r\n",
    ),
    "interim answers": (b"", b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n"),
    "endless error": (b"HTTP/1.1 400 Bad Request\r\n\r\n", BLOCK),
    "endless white space": (OK + b"\r\n", b" " * 65536),
}


class Flood:
    """Answers every request with a head and then the same bytes, as long as they are taken."""

    def __init__(self, head: bytes, block: bytes) -> None:
        self.head, self.block = head, block
        self.most = 0
        """Bytes that were taken from it in one connection."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = 0
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(self.head)
            while sent < ENOUGH:
                writer.write(self.block)
                sent += len(self.block)
                await writer.drain()
        except OSError:
            pass
        finally:
            self.most = max(self.most, sent)
            writer.close()


@asynccontextmanager
async def flooding(name: str) -> AsyncIterator[tuple[Flood, str]]:
    flood = Flood(*FLOODS[name])
    server = await asyncio.start_server(flood.serve, "127.0.0.1", 0)
    async with server:
        yield flood, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


ONCE = RetryPolicy(max_retries=0)


def servers(url: str) -> EngineServersConfig:
    return EngineServersConfig(base_urls=[url], outage_patience=0)


POLICIES: dict[str, Callable[[str], VllmPolicy | SglangPolicy | LlamaCppPolicy | OpenAIPolicy]] = {
    "vllm": lambda url: VllmPolicy(servers(url), "m", BytesRenderer(), retry=ONCE),
    "sglang": lambda url: SglangPolicy(servers(url), BytesRenderer(), retry=ONCE),
    "llama_cpp": lambda url: LlamaCppPolicy(servers(url), BytesRenderer(), retry=ONCE),
    "openai": lambda url: OpenAIPolicy(OpenAIPolicyConfig(base_url=f"{url}/v1", model="m"), retry=ONCE),
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_of_any_kind_is_given_up_early(flood: str) -> None:
    async with flooding(flood) as (server, url):
        policy = POLICIES["vllm"](url)
        prompt = Prompt("e", ("k",), [Message("user", "go")], ids=token_ids([1, 2, 3]))
        with pytest.raises(EngineError):
            await policy.generate(prompt, Sampling(max_tokens=16))
        await policy.close()
    assert server.most < ENOUGH


@pytest.mark.parametrize("kind", POLICIES)
async def test_every_engine_client_bounds_an_answer_by_what_was_asked(kind: str) -> None:
    async with flooding("endless body") as (server, url):
        policy = POLICIES[kind](url)
        prompt = Prompt("e", ("k",), [Message("user", "go")], ids=token_ids([1, 2, 3]))
        with pytest.raises(EngineError, match=r"the answer is longer than 1\d{6} bytes"):
            await policy.generate(prompt, Sampling(max_tokens=16))
        await policy.close()
    assert server.most < ENOUGH


async def test_an_engine_that_is_asked_what_it_can_do_is_bounded_too() -> None:
    async with flooding("endless body") as (server, url):
        policy = POLICIES["sglang"](url)
        with pytest.raises(EngineError, match="the answer is longer than"):
            await policy.probe()
        await policy.close()
    assert server.most < ENOUGH


async def test_a_search_servers_answer_is_bounded() -> None:
    async with flooding("endless body") as (server, url):
        search = HttpSearch(url)
        with pytest.raises(ToolFailure, match="the answer is longer than"):
            await search.search("anything", 3)
        await search.close()
    assert server.most < ENOUGH
