"""What the server lets in: everything else gets a 4xx and one line."""

import base64
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rollwright.errors import ConfigError
from rollwright.store.backend import handles
from rollwright.store.calls import Statistics
from rollwright.store.errors import StoreError
from rollwright.store.http.client import HttpStore
from rollwright.store.http.protocol import WithdrawCall
from rollwright.store.http.retry import RetryRule
from rollwright.store.http.server import StoreServer, build_app, serve
from rollwright.store.memory import MemoryStore

MAX_BODY = 2000
JSON = {"Content-Type": "application/json"}
MSGPACK = {"Content-Type": "application/msgpack"}
TOKEN = {"Authorization": "Bearer secret"}


class BrokenStore(MemoryStore):
    @handles(Statistics)
    async def _statistics(self, call: Statistics) -> dict[str, int]:
        raise RuntimeError("line one\nline two of what only the log may tell")


class Caller:
    """Requests as any program may send them."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def post(
        self, path: str, body: bytes | str, headers: dict[str, str] = JSON | TOKEN
    ) -> tuple[int, dict[str, Any]]:
        async with self._session.post(
            f"{self._url}{path}", data=body, headers=headers, skip_auto_headers=("Content-Type",)
        ) as response:
            raw = await response.read()
            assert response.status == 200 or b"\n" not in raw, "a refusal is one line"
            assert b"Traceback" not in raw
            packed = response.content_type == "application/msgpack"
            return response.status, (msgspec.msgpack if packed else msgspec.json).decode(raw)


@pytest.fixture
async def caller() -> AsyncIterator[Caller]:
    async with (
        StoreServer(BrokenStore(), token="secret", max_body=MAX_BODY) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Caller(server.url, session)


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "Bearer sécret"}],
    ids=["no token", "a wrong one", "no scheme", "odd letters"],
)
async def test_without_the_token_nothing_is_answered(caller: Caller, headers: dict[str, str]) -> None:
    for path in ("/v1/get_latest_resources", "/v1/batch", "/v1/no_such_call"):
        status, answer = await caller.post(path, "{}", JSON | headers)
        assert (status, answer["kind"]) == (401, "unauthorized")


async def test_a_client_with_a_wrong_token_is_told_so() -> None:
    async with StoreServer(MemoryStore(), token="secret") as server:
        for token in (None, "wrong"):
            store = HttpStore(server.url, token=token)
            with pytest.raises(StoreError, match="token is missing or wrong: ROLLWRIGHT_STORE_TOKEN must"):
                await store.enqueue_rollout(None)
            await store.close()


async def test_a_call_that_the_server_answers_itself_is_none_of_a_store() -> None:
    store = MemoryStore()
    with pytest.raises(StoreError, match="withdraw_call: is no call of a store"):
        await store.execute(WithdrawCall(call_id="call-1"))
    await store.close()


async def test_a_body_beyond_the_limit_is_refused(caller: Caller) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * (MAX_BODY // 5)

    for body in (b"x" * (MAX_BODY + 1), chunks()):
        status, answer = await caller.post("/v1/get_latest_resources", body)  # type: ignore[arg-type]
        assert (status, answer["kind"]) == (413, "too_large")
        assert str(MAX_BODY) in answer["message"]
    assert (await caller.post("/v1/get_latest_resources", b"{}" + b" " * (MAX_BODY - 2)))[0] == 200


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ("", JSON),
        ("{", JSON),
        (b"\xff", JSON),
        ('{"rollout_id": "\\ud800"}', JSON),
        (b'{"rollout_id": "' + b"\xff" + b'"}', JSON),
        (b"\xc1", MSGPACK),
        (b"\x81\xaarollout_id\xa1\xff", MSGPACK),
        (b"\x91" * 1900, MSGPACK),
    ],
)
async def test_what_cannot_be_read_is_malformed(caller: Caller, body: bytes, headers: dict[str, str]) -> None:
    status, answer = await caller.post("/v1/get_rollout_by_id", body, headers | TOKEN)
    assert status in (400, 422)
    assert answer["kind"] in ("malformed", "invalid")


@pytest.mark.parametrize(
    ("call", "body"),
    [
        ("get_rollout_by_id", '{"rollout_id": "ro-1", "typo": 1}'),
        ("get_rollout_by_id", "{}"),
        ("get_rollout_by_id", "[]"),
        ("get_rollout_by_id", '{"rollout_id": 1}'),
        ("enqueue_many_rollouts", '{"requests": [{"input": 1, "typo": 1}]}'),
        ("enqueue_many_rollouts", '{"requests": [{"input": 1, "config": {"typo": 1}}]}'),
        ("query_rollouts", '{"status": ["bogus"]}'),
        ("query_rollouts", '{"limit": -2}'),
        ("dequeue_many_rollouts", '{"timeout": 31}'),
        ("dequeue_many_rollouts", '{"limit": 0}'),
    ],
)
async def test_fields_are_checked(caller: Caller, call: str, body: str) -> None:
    status, answer = await caller.post(f"/v1/{call}", body)
    assert (status, answer["kind"]) == (422, "invalid")


@pytest.mark.parametrize("odd", ["", "a b", "a/b", "ü", "x" * 201, "a\n", "'; --", "../x", "%2e"])
async def test_ids_with_odd_characters_are_refused(caller: Caller, odd: str) -> None:
    body = msgspec.json.encode({"rollout_id": odd})
    for call in ("get_rollout_by_id", "query_attempts", "start_attempt", "read_journal"):
        status, answer = await caller.post(f"/v1/{call}", body)
        assert (status, answer["kind"]) == (422, "invalid")
    named = msgspec.json.encode({"requests": [{"input": 1, "rollout_id": odd}]})
    assert (await caller.post("/v1/enqueue_many_rollouts", named))[0] == 400


async def test_other_paths_methods_and_media_types_are_refused(caller: Caller) -> None:
    status, answer = await caller.post("/v1/no_such_call", "{}")
    assert (status, answer["kind"]) == (404, "no_such_call")
    assert "dequeue_many_rollouts" in answer["message"]
    assert (await caller.post("/elsewhere", "{}"))[0] == 404
    assert (await caller.post("/health", "{}"))[0] == 405
    for headers in (TOKEN, TOKEN | {"Content-Type": "text/plain"}):
        status, answer = await caller.post("/v1/get_latest_resources", "{}", headers)
        assert (status, answer["kind"]) == (415, "media_type")


async def test_a_failing_store_is_a_500_of_one_line(caller: Caller) -> None:
    status, answer = await caller.post("/v1/statistics", "{}")
    assert (status, answer["kind"]) == (500, "internal")
    assert "line two" not in answer["message"]


async def test_a_web_page_cannot_call_a_server_without_a_token() -> None:
    async with StoreServer(MemoryStore()) as server, aiohttp.ClientSession() as session:
        caller = Caller(server.url, session)
        status, answer = await caller.post("/v1/statistics", "{}", JSON | {"Origin": server.url})
        assert (status, answer["kind"]) == (403, "forbidden")
        assert (await caller.post("/v1/statistics", "{}", JSON))[0] == 200


async def test_one_bad_call_does_not_spoil_its_batch(caller: Caller) -> None:
    batch = [
        {"call": "enqueue_many_rollouts", "arguments": {"requests": [{"input": 1, "rollout_id": "ro-1"}]}},
        {"call": "no_such_call", "arguments": {}},
        {"call": "get_rollout_by_id", "arguments": {"typo": 1}},
        {"call": "dequeue_many_rollouts", "arguments": {"timeout": 1}},
        {"call": "query_attempts", "arguments": {"rollout_id": "ro-9"}},
        {"call": "statistics", "arguments": {}},
        {"call": "get_rollout_by_id", "arguments": {"rollout_id": "ro-9"}},
    ]
    status, outcomes = await caller.post("/v1/batch", msgspec.json.encode(batch))
    assert status == 200
    kinds = [each["refusal"]["kind"] if "refusal" in each else "answer" for each in outcomes]  # type: ignore[index]
    assert kinds == ["answer", "no_such_call", "invalid", "refused", "not_found", "internal", "answer"]


async def test_json_carries_bytes_as_base64(caller: Caller) -> None:
    _, started = await caller.post(
        "/v1/start_requested_rollout", '{"request": {"input": 1, "rollout_id": "ro-1"}}'
    )
    report = {
        "rollout_id": "ro-1",
        "attempt_id": started["attempt"]["attempt_id"],
        "status": "succeeded",
        "trajectory": base64.b64encode(b"\x00\xff").decode(),
    }
    assert (await caller.post("/v1/update_attempt", msgspec.json.encode(report)))[0] == 200
    packed = msgspec.msgpack.encode({"rollout_ids": ["ro-1"]})
    found = {"trajectories": {"ro-1": b"\x00\xff"}, "unread": []}
    assert await caller.post("/v1/get_trajectories", packed, MSGPACK | TOKEN) == (200, found)
    asked = await caller.post("/v1/get_trajectories", '{"rollout_ids": ["ro-1"]}')
    assert asked == (200, {"trajectories": {"ro-1": report["trajectory"]}, "unread": []})


async def test_what_json_cannot_carry_is_said_so(caller: Caller) -> None:
    request = {"input": {None: 1}, "rollout_id": "ro-1"}
    packed = msgspec.msgpack.encode({"requests": [request]})
    assert (await caller.post("/v1/enqueue_many_rollouts", packed, MSGPACK | TOKEN))[0] == 200
    status, answer = await caller.post("/v1/get_rollout_by_id", '{"rollout_id": "ro-1"}')
    assert (status, answer["kind"]) == (406, "not_acceptable")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
async def test_a_server_without_a_token_listens_only_to_its_own_machine(host: str) -> None:
    with pytest.raises(ConfigError, match="give a token, or listen on"):
        await serve(MemoryStore(), host, 0)


@pytest.mark.parametrize("token", ["", " x", "a\nb", "ü"])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        build_app(MemoryStore(), token)


async def test_a_port_that_is_taken_is_one_line() -> None:
    async with StoreServer(MemoryStore()) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            StoreServer(MemoryStore(), port=port)


async def test_a_socket_is_for_its_user_alone_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "store.sock"
    async with StoreServer(MemoryStore(), path=path) as server:
        assert server.url == f"http+unix://{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(ConfigError, match="cannot listen"):
            StoreServer(MemoryStore(), path=path)
    assert not path.exists()


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "http://", "http+unix://relative", "http://user:word@host", "http://[", "host:80"]
)
async def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="store: "):
        HttpStore(url)


async def test_an_unreachable_server_is_one_line(tmp_path: Path) -> None:
    store = HttpStore(f"http+unix://{tmp_path}/nothing.sock", retry=RetryRule(give_up_after=0))
    with pytest.raises(Exception, match=r"nothing.sock.*\(after 1 try\)") as caught:
        await store.statistics()
    assert "\n" not in str(caught.value)
    await store.close()
