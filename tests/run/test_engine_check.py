"""The engine is asked before anything is opened, and what it said is the error, in one line."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollwright.config import OpenAIPolicyConfig
from rollwright.engines.base import EngineError
from rollwright.engines.factory import build_policy
from rollwright.run import checks
from rollwright.run.checks import probe_engine, unused_proxies

MODELS = {"data": [{"id": "qwen-small"}, {"id": "qwen-large"}, {"not": "a model"}]}
COMPLETION = {"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]}

Answer = tuple[int, Any]


@asynccontextmanager
async def server(answers: dict[str, Answer], seen: list[str] | None = None) -> AsyncIterator[str]:
    """Answers by path, 404 for all others; a path with `None` is never answered."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split()[1].decode()
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        await reader.readexactly(int(line.split(b":")[1]))
                if seen is not None:
                    seen.append(path)
                status, body = answers.get(path, (404, {"detail": "Not Found"}))
                encoded = json.dumps(body).encode()
                writer.write(
                    b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(encoded)) + encoded
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def saying(words: bytes) -> AsyncIterator[int]:
    """The port of a server that says the same to everything."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(words)
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as listening:
        yield listening.sockets[0].getsockname()[1]


def config(base_url: str, model: str = "qwen-small") -> OpenAIPolicyConfig:
    return OpenAIPolicyConfig(kind="openai", base_url=base_url, model=model)


async def asked(base_url: str, model: str = "qwen-small") -> str:
    """What the error says; empty: the engine can be used."""
    settings = config(base_url, model)
    policy = build_policy(settings)
    try:
        await probe_engine(policy, settings)
    except EngineError as error:
        return str(error)
    finally:
        await policy.close()
    return ""


async def test_a_model_that_is_listed_costs_no_token() -> None:
    seen: list[str] = []
    async with server({"/v1/models": (200, MODELS)}, seen) as url:
        assert await asked(f"{url}/v1") == ""
    assert seen == ["/v1/models"]


@pytest.mark.parametrize(
    "models", [(200, MODELS), (404, {}), (403, {"error": "no list for this key"}), (200, "hello"), (200, {})]
)
async def test_where_the_list_does_not_decide_one_token_does(models: Answer) -> None:
    answers = {"/v1/models": models, "/v1/chat/completions": (200, COMPLETION)}
    async with server(answers) as url:
        assert await asked(f"{url}/v1", "an-alias") == ""


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        pytest.param(
            {
                "/v1/models": (401, {"error": {"message": "bad key"}}),
                "/v1/chat/completions": (401, "bad key"),
            },
            ["HTTP 401", "bad key", "api_key_env"],
            id="wrong key",
        ),
        pytest.param(
            {"/v1/models": (200, MODELS), "/v1/chat/completions": (404, {"error": "no model qwen-smal"})},
            ["no model qwen-smal", "qwen-small, qwen-large", "policy.model"],
            id="unknown model",
        ),
        pytest.param({}, ["HTTP 404", "base_url"], id="wrong path"),
        pytest.param(
            {"/v1/models": (200, {}), "/v1/chat/completions": (200, {"hello": 1})},
            ["not a completion"],
            id="no completion",
        ),
    ],
)
async def test_what_the_engine_said_is_the_error(answers: dict[str, Answer], says: list[str]) -> None:
    async with server(answers) as url:
        said = await asked(f"{url}/v1", "qwen-smal")
    assert all(each in said for each in says), said
    assert "\n" not in said


async def test_a_busy_engine_is_no_reason_to_refuse() -> None:
    async with server({"/v1/chat/completions": (429, "slow down")}) as url:
        assert await asked(f"{url}/v1") == ""


async def test_a_server_that_is_down_is_asked_again_before_it_counts_as_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollwright.engines.openai_probe.PAUSE", 0.0)
    seen: list[str] = []
    async with server({"/v1/chat/completions": (503, "loading")}, seen) as url:
        assert "HTTP 503: loading" in await asked(f"{url}/v1")
    assert seen.count("/v1/chat/completions") == 3


async def test_nobody_there_no_tls_and_no_http_are_told_apart() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    said = await asked(nobody)
    assert "Connection refused" in said
    assert "start the engine" in said
    async with saying(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as port:
        assert "http:// instead of https://" in await asked(f"https://127.0.0.1:{port}/v1")
    async with saying(b"220 mail.example.org ESMTP\r\n") as port:
        assert "does not speak HTTP" in await asked(f"http://127.0.0.1:{port}/v1")


async def test_silence_is_told_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollwright.engines.openai_probe.ANSWER_SECONDS", 0.2)
    hold: Callable[[Any, Any], Awaitable[None]] = lambda reader, writer: asyncio.sleep(30)  # noqa: E731
    listening = await asyncio.start_server(hold, "127.0.0.1", 0)
    said = await asked(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1")
    listening.close()
    assert "no answer within 0.2 s" in said


def test_a_proxy_that_is_not_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    proxies = {"https": "http://proxy:3128"}
    assert unused_proxies(["https://api.example.org/v1"], proxies) == [
        "https_proxy is set, and engines are asked without a proxy"
    ]
    assert unused_proxies(["http://api.example.org/v1"], proxies) == []
    assert unused_proxies(["https://127.0.0.1/v1"], proxies) == []


async def test_an_answer_of_another_shape_is_an_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd:
        async def probe(self) -> None:
            raise KeyError("data")

    monkeypatch.setattr(checks, "Probed", Odd)
    with pytest.raises(EngineError, match="not understood"):
        await probe_engine(Odd())  # type: ignore[arg-type]


TRAINED = """
policy: {kind: vllm, base_urls: ["http://127.0.0.1:1"], model: m, renderer: {tokenizer: MODEL, name: template}}
training: {model: MODEL}
train_env_manager: {num_env_groups: 2, group_size: 2, tags: [FrozenLake]}
"""

PLAYED = """
policy: {kind: openai, base_url: "http://127.0.0.1:1/v1", model: m}
train_env_manager: {num_env_groups: 2, group_size: 2, tags: [FrozenLake]}
"""


@pytest.mark.parametrize("command", ["run", "train", "worker"])
def test_an_engine_that_is_not_there_ends_the_command_with_code_1_and_no_run_folder(
    command: str, tmp_path: Path
) -> None:
    words = [command, "it.yaml"]
    text = PLAYED
    if command == "train":
        text = TRAINED.replace("MODEL", str(Path(__file__).parents[2] / "models" / "frozen_lake"))
    (tmp_path / "it.yaml").write_text(text, encoding="utf-8")
    if command == "worker":
        (tmp_path / "tasks.jsonl").write_text("{}\n", encoding="utf-8")
        enqueue = ["enqueue", "tasks.jsonl", "--store", "s.db", "--config", "it.yaml"]
        assert _rollwright(enqueue, tmp_path).returncode == 0
        words = ["worker", "--store", "s.db", "--max-rollouts", "1"]
    done = _rollwright(words, tmp_path)
    assert done.returncode == 1, done.stderr
    assert "Connection refused" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def _rollwright(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollwright", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
