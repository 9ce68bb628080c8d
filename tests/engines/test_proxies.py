"""Hosted APIs are asked through the proxy that the environment names, with CONNECT for https; engines are not."""

import asyncio
import gzip
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rollwright.engines import EngineError, Prompt, Sampling
from rollwright.engines.openai import OpenAIPolicy
from rollwright.engines.settings import OpenAIPolicyConfig
from rollwright.errors import ConfigError
from rollwright.http import Url
from rollwright.http.proxy import proxy_for
from rollwright.http.retry import RetryPolicy
from rollwright.trajectory import Message

HOST = "api.rollwright.test"
"""Nobody but the proxy knows where that is."""

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")

COMPLETION = json.dumps(
    {"choices": [{"message": {"content": "through"}, "finish_reason": "stop"}], "usage": {}}
).encode()

PROMPT = Prompt("e", ("k",), [Message("user", "go")])


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


class Proxy:
    """A forwarding proxy: CONNECT for any port, and plain requests in absolute form. All names lead to this machine."""

    def __init__(self, password: str | None = None) -> None:
        self.lines: list[str] = []
        self._password = password

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            line, *headers = head.split("\r\n")
            self.lines.append(line)
            if self._password is not None and f"Basic {self._password}" not in head:
                writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
                return
            method, target, _ = line.split(" ")
            url = Url.parse(target if "://" in target else f"https://{target}")
            there, onward = await asyncio.open_connection("127.0.0.1", url.port)
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                onward.write("\r\n".join([f"{method} {url.target} HTTP/1.1", *headers]).encode())
            await asyncio.gather(pump(reader, onward), pump(there, writer))
        finally:
            writer.close()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


class Api:
    """Answers every POST with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.heads: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                length = next(
                    line for line in head.lower().split("\r\n") if line.startswith("content-length")
                )
                await reader.readexactly(int(length.partition(":")[2]))
                writer.write(self.answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()


def plain(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *headers, b"", body])


@asynccontextmanager
async def listening(server: Proxy | Api, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    running = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    async with running:
        yield running.sockets[0].getsockname()[1]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For `HOST`, signed by itself, with its key in the same file."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file: Path = tmp_path_factory.mktemp("tls") / "cert.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(made.public_bytes(serialization.Encoding.PEM) + private)
    return file


async def ask(url: str, max_tokens: int = 16) -> str:
    policy = OpenAIPolicy(
        OpenAIPolicyConfig(base_url=url, model="m"), api_key="secret", retry=RetryPolicy(max_retries=0)
    )
    try:
        return (await policy.generate(PROMPT, Sampling(max_tokens=max_tokens))).text
    finally:
        await policy.close()


@pytest.mark.parametrize("variable", ["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"])
async def test_an_https_api_is_asked_through_a_tunnel(
    environment: pytest.MonkeyPatch, certificate: Path, variable: str
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)
    proxy, api = Proxy(), Api(plain(COMPLETION))
    async with listening(proxy) as way, listening(api, tls) as port:
        environment.setenv(variable, f"http://127.0.0.1:{way}")
        environment.setenv("SSL_CERT_FILE", str(certificate))
        assert await ask(f"https://{HOST}:{port}/v1") == "through"
    assert proxy.lines == [f"CONNECT {HOST}:{port} HTTP/1.1"]
    assert "Bearer secret" in api.heads[0]  # the key is for the API alone, inside the tunnel
    assert api.heads[0].startswith("POST /v1/chat/completions ")


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY"])
async def test_a_plain_api_is_asked_through_the_proxy_too(
    environment: pytest.MonkeyPatch, variable: str
) -> None:
    proxy, api = Proxy(), Api(plain(COMPLETION))
    async with listening(proxy) as way, listening(api) as port:
        environment.setenv(variable, f"127.0.0.1:{way}")  # a scheme may be left out
        assert await ask(f"http://{HOST}:{port}/v1") == "through"
        assert proxy.lines == [f"POST http://{HOST}:{port}/v1/chat/completions HTTP/1.1"]


async def test_a_proxy_gets_its_password_and_a_refusal_is_told_without_it(
    environment: pytest.MonkeyPatch,
) -> None:
    proxy, api = Proxy("bWU6d29yZA=="), Api(plain(COMPLETION))  # me:word
    async with listening(proxy) as way, listening(api) as port:
        environment.setenv("http_proxy", f"http://me:word@127.0.0.1:{way}")
        assert await ask(f"http://{HOST}:{port}/v1") == "through"
        environment.setenv("https_proxy", f"http://me:wrong@127.0.0.1:{way}")
        with pytest.raises(EngineError, match="the proxy answered HTTP 407") as caught:
            await ask(f"https://{HOST}:{port}/v1")
        assert "wrong" not in str(caught.value)


async def test_a_proxy_that_is_not_there_is_told(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("http_proxy", "http://127.0.0.1:9")
    with pytest.raises(EngineError, match=r"Cannot connect to the proxy 127\.0\.0\.1:9: "):
        await ask(f"http://{HOST}/v1")


async def test_a_compressed_answer_is_unpacked(environment: pytest.MonkeyPatch) -> None:
    proxy, api = Proxy(), Api(plain(gzip.compress(COMPLETION), b"Content-Encoding: gzip"))
    async with listening(proxy) as way, listening(api) as port:
        environment.setenv("http_proxy", f"http://127.0.0.1:{way}")
        assert await ask(f"http://{HOST}:{port}/v1") == "through"
    assert "accept-encoding: gzip" in api.heads[0].lower()


BOMB = gzip.compress(bytes(64 * 1024 * 1024), 9)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (plain(BOMB, b"Content-Encoding: gzip"), "the answer is longer than"),
        (plain(BOMB[:1000], b"Content-Encoding: gzip"), "the answer is longer than|ended in the middle"),
        (
            plain(gzip.compress(b"{}") + bytes(8 << 20), b"Content-Encoding: gzip"),
            "the answer is longer than",
        ),
        (plain(bytes(8 << 20)), "the answer is longer than"),
        (plain(b"x", b"Content-Encoding: br"), "which the request did not allow"),
        (plain(b"not gzip", b"Content-Encoding: gzip"), "broken HTTP response"),
    ],
    ids=["bomb", "cut bomb", "tail", "long", "unknown", "not gzip"],
)
async def test_what_comes_through_a_proxy_is_bounded_also_when_it_is_unpacked(
    environment: pytest.MonkeyPatch, answer: bytes, why: str
) -> None:
    proxy, api = Proxy(), Api(answer)
    async with listening(proxy) as way, listening(api) as port:
        environment.setenv("http_proxy", f"http://127.0.0.1:{way}")
        with pytest.raises(EngineError, match=why):
            await ask(f"http://{HOST}:{port}/v1")


def url(text: str) -> Url:
    return Url.parse(text)


@pytest.mark.parametrize(
    ("excepted", "address", "through"),
    [
        ("", "http://api.example.org/v1", True),
        ("", "http://127.0.0.1:8000/v1", False),
        ("", "http://127.9.9.9:8000/v1", False),
        ("", "http://[::1]:8000/v1", False),
        ("", "http://localhost:8000/v1", False),
        ("*", "http://api.example.org/v1", False),
        ("api.example.org", "http://api.example.org/v1", False),
        (".example.org", "http://api.example.org/v1", False),
        ("example.org", "http://api.example.org/v1", False),
        ("other.org, example.org", "http://api.example.org/v1", False),
        ("api.example.org:8000", "http://api.example.org:8000/v1", False),
        ("api.example.org:8000", "http://api.example.org/v1", True),
        ("ample.org", "http://api.example.org/v1", True),
        ("10.0.0.0/8", "http://10.1.2.3:8000/v1", False),
        ("10.0.0.0/8", "http://11.1.2.3:8000/v1", True),
        ("10.1.2.3", "http://10.1.2.3:8000/v1", False),
    ],
)
def test_who_is_excepted_is_asked_directly(
    environment: pytest.MonkeyPatch, excepted: str, address: str, through: bool
) -> None:
    environment.setenv("http_proxy", "http://proxy:3128")
    for name in ("no_proxy", "NO_PROXY"):
        environment.setenv(name, excepted)
        assert (proxy_for(url(address)) == "http://proxy:3128") is through
        environment.delenv(name)


def test_a_scheme_has_its_own_proxy(environment: pytest.MonkeyPatch) -> None:
    assert proxy_for(url("https://a.org/")) is None
    environment.setenv("http_proxy", "http://one:1")
    assert proxy_for(url("https://a.org/")) is None
    environment.setenv("ALL_PROXY", "http://all:3")
    assert proxy_for(url("https://a.org/")) == "http://all:3"
    environment.setenv("https_proxy", "http://two:2")
    assert proxy_for(url("https://a.org/")) == "http://two:2"
    assert proxy_for(url("http://a.org/")) == "http://one:1"


def test_a_proxy_that_cannot_be_used_is_refused_before_the_start(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("ALL_PROXY", "socks5://me:word@proxy:1080")
    with pytest.raises(ConfigError, match="all_proxy: 'socks5://proxy' is not a usable proxy") as caught:
        OpenAIPolicy(OpenAIPolicyConfig(base_url=f"https://{HOST}/v1", model="m"))
    assert "word" not in str(caught.value)


def test_a_missing_library_is_told_in_one_line_where_a_proxy_needs_it(
    environment: pytest.MonkeyPatch,
) -> None:
    environment.setitem(sys.modules, "aiohttp", None)  # type: ignore[arg-type]
    OpenAIPolicy(OpenAIPolicyConfig(base_url=f"https://{HOST}/v1", model="m"))
    environment.setenv("https_proxy", "http://proxy:3128")
    with pytest.raises(ConfigError, match=r"install rollwright\[hosted\], or name the host in no_proxy"):
        OpenAIPolicy(OpenAIPolicyConfig(base_url=f"https://{HOST}/v1", model="m"))


def test_without_a_proxy_the_library_is_not_imported() -> None:
    code = (
        "import sys\nfrom rollwright.engines.openai import OpenAIPolicy\n"
        "from rollwright.engines.settings import OpenAIPolicyConfig\n"
        "OpenAIPolicy(OpenAIPolicyConfig(base_url='https://api.example.org/v1', model='m'))\nassert 'aiohttp' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


async def test_a_policy_can_be_used_from_one_event_loop_after_another(
    environment: pytest.MonkeyPatch,
) -> None:
    def twice() -> list[Any]:
        policy = OpenAIPolicy(
            OpenAIPolicyConfig(base_url=f"http://{HOST}:{port}/v1", model="m"),
            retry=RetryPolicy(max_retries=0),
        )
        first = asyncio.run(policy.generate(PROMPT, Sampling())).text

        async def again() -> str:
            try:
                return (await policy.generate(PROMPT, Sampling())).text
            finally:
                await policy.close()

        return [first, asyncio.run(again())]

    proxy, api = Proxy(), Api(plain(COMPLETION))
    async with listening(proxy) as way, listening(api) as port:
        environment.setenv("http_proxy", f"http://127.0.0.1:{way}")
        assert await asyncio.to_thread(twice) == ["through", "through"]
