"""One caller of the gateway does not keep the others waiting, and nothing that anybody sends makes it fail."""

import contextlib
import http.client
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollwright.engines.base import Sampling
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.gateway import Gateway
from rollwright.gateway.chat_completions import ChatCompletions
from rollwright.gateway.endpoint import MAX_BODY, MAX_MARKS
from rollwright.gateway.requests import MAX_MESSAGES, MAX_TOOLS
from rollwright.gateway.service import GatewayService, ServiceSettings
from rollwright.run.gc_tuning import short_collections
from rollwright.simulation.engine import SimulatedEngine
from rollwright.store.http.decoding import json_values
from rollwright.store.http.errors import HttpRefusal
from rollwright.store.memory import MemoryStore

ADMIN = "rw-admin"


class Open(NamedTuple):
    """A gateway with one rollout."""

    place: str
    path: str
    key: str

    def post(self, path: str, body: bytes, key: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.place, timeout=60)
        connection.request("POST", path, body, {"Authorization": f"Bearer {key or self.key}"})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, content


def a_gateway(sequence_length: int) -> Callable[[], Any]:
    @asynccontextmanager
    async def made() -> AsyncIterator[Open]:
        store = MemoryStore()
        sampling = Sampling(max_tokens=16)
        service = GatewayService(
            store,
            SimulatedEngine(tokens_per_second=1e6),
            Gateway(),
            ServiceSettings(sampling, sequence_length=sequence_length),
            admin_key=ADMIN,
        )
        service.listen()
        opened = await service.create(ADMIN.encode(), b'{"input": 1}', None)
        url, _, path = opened["base_url"].removeprefix("http://").partition("/")
        with short_collections(whole=True):  # as `rollwright gateway` has it
            yield Open(url, f"/{path}", opened["api_key"])
        await service.close()
        await store.close()

    return made


def message(content: str = "x") -> dict[str, str]:
    return {"role": "user", "content": content}


def tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{n}", "parameters": {"a": n}}} for n in range(count)]


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": messages, **more}


LONG = 1_000_000
ROOM = 100_000
TEXT = "x" * 10_000_000
PART = {"type": "text", "text": "x" * 100}
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": json.dumps({"a": TEXT})}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "x"}
SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"a": TEXT}}}
KEYS = {"type": "function", "function": {"name": "f", "parameters": {f"k{n}": n for n in range(390_000)}}}

VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "a message": ("/chat/completions", chat(message(TEXT)), 400),
    "a stream": ("/chat/completions", chat(message(TEXT), stream=True), 400),
    "many parts": ("/chat/completions", chat({"role": "user", "content": [PART] * 90_000}), 400),
    "a system text": ("/chat/completions", chat({"role": "system", "content": TEXT}, message()), 400),
    "a tool's result": ("/chat/completions", chat(CALLED, RESULT | {"content": TEXT}), 400),
    "a tool's schema": ("/chat/completions", chat(message(), tools=[SCHEMA]), 400),
    "a schema of many keys": ("/chat/completions", chat(message(), tools=[KEYS]), 400),
    "a call's arguments": ("/chat/completions", chat(CALLED, RESULT), 200),
    "thoughts": (
        "/chat/completions",
        chat({"role": "assistant", "content": "x", "reasoning_content": TEXT}, message()),
        200,
    ),
    "more thoughts than tokens could be": (
        "/chat/completions",
        chat({"role": "assistant", "content": "x", "reasoning_content": TEXT + TEXT}, message()),
        400,
    ),
    "many stop texts": ("/chat/completions", chat(message(), stop=["\n"] * 100_000), 413),
    "a stop text": ("/chat/completions", chat(message(), stop=TEXT), 413),
    "a model's name": ("/chat/completions", chat(message(), model=TEXT, stream=True), 413),
    "nothing but escapes": ("/chat/completions", chat(message("\n" * 15_000_000)), 413),
    "Anthropic's": ("/messages", chat(message(TEXT), max_tokens=4), 400),
    "Anthropic's system text": ("/messages", chat(message(), max_tokens=4, system=TEXT, stream=True), 400),
    "an input": ("/responses", {"input": TEXT, "stream": True}, 400),
    "instructions": ("/responses", {"input": "x", "instructions": TEXT}, 400),
}
"""10 MB each, by where they stand: the path, the request, and the status of the answer."""

REQUESTS: list[tuple[str, dict[str, Any], int, int]] = [
    ("400,000 messages", {"messages": [message()] * 400_000}, LONG, 413),
    ("as many messages as may be", {"messages": [message()] * MAX_MESSAGES}, LONG, 200),
    ("one more", {"messages": [message()] * (MAX_MESSAGES + 1)}, LONG, 413),
    ("more messages than tokens", {"messages": [message()] * 200}, 100, 400),
    ("a text that cannot fit", {"messages": [message("y" * 2_000_000)]}, 8192, 400),
    ("a text that might have fitted", {"messages": [message("y" * 1_000_000)]}, 8192, 400),
    ("a text that fits", {"messages": [message("y" * 500_000)]}, LONG, 200),
    ("many tools", {"messages": [message()], "tools": tools(MAX_TOOLS)}, LONG, 200),
    ("too many tools", {"messages": [message()], "tools": tools(MAX_TOOLS + 1)}, LONG, 413),
    ("nothing but brackets", {"messages": [{"role": "user", "content": [[]] * 300_000}]}, LONG, 413),
    ("30 MB of letters", {"messages": [message("z" * 30_000_000)]}, LONG, 400),
]


@pytest.mark.parametrize("sequence_length", sorted({each[2] for each in REQUESTS}))
def test_no_request_keeps_the_others_waiting(sequence_length: int, loop_thread: Any) -> None:
    with loop_thread.serving(a_gateway(sequence_length)) as gateway:
        for name, request, wanted, status in REQUESTS:
            if wanted != sequence_length:
                continue
            loop_thread.forget()
            found, said = gateway.post(f"{gateway.path}/chat/completions", json.dumps(request).encode())
            assert found == status, (name, said[:200])
            loop_thread.check(name)


def test_ten_megabytes_anywhere_keep_nobody_waiting(
    loop_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what cannot fit is not even rendered: calls behind it in its rollout would wait for that."""
    rendered: list[int] = []
    plain = BytesRenderer.open

    def noted(renderer: BytesRenderer, messages: Any, tools: Any = ()) -> Any:
        ids = plain(renderer, messages, tools)
        rendered.append(len(ids))
        return ids

    monkeypatch.setattr(BytesRenderer, "open", noted)
    with loop_thread.serving(a_gateway(ROOM)) as gateway:
        for name, (path, request, status) in VARIANTS.items():
            loop_thread.forget()
            found, said = gateway.post(gateway.path + path, json.dumps(request).encode())
            assert found == status, (name, said[:200])
            loop_thread.check(name)
        found, said = gateway.post(f"{gateway.path}/chat/completions", b'{"messages": ' + b"[" * 10_000_000)
        assert found == 413, said[:200]
        fits = chat(message("x" * (ROOM - 100)))
        assert gateway.post(f"{gateway.path}/chat/completions", json.dumps(fits).encode())[0] == 200
    assert max(rendered) < ROOM


WORST = {
    "parts": chat({"role": "user", "content": [PART] * 90_000}),
    "keys": chat(message(), tools=[KEYS]),
    "brackets": chat({"role": "user", "content": [[]] * 190_000}),
    "letters": chat(message("é😀" * 5_000_000)),
    "escapes": chat(message("\n" * 6_000_000)),
}


@pytest.mark.parametrize("name", WORST)
def test_the_most_that_a_request_may_hold_is_decoded_quickly(name: str, loop_thread: Any) -> None:
    """A decoder keeps all threads waiting."""
    body = json.dumps(WORST[name], ensure_ascii=False).encode()
    assert len(body) < MAX_BODY
    assert json_values(body, MAX_MARKS) <= MAX_MARKS
    times = []
    for _ in range(3):
        with short_collections(whole=False):
            began = time.thread_time()
            with contextlib.suppress(HttpRefusal):
                ChatCompletions().read(body)
            times.append(time.thread_time() - began)
    assert min(times) < loop_thread.most_seconds()


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KNOWN = [
    *(
        "messages",
        "input",
        "tools",
        "tool_choice",
        "stream",
        "stream_options",
        "stop",
        "stop_sequences",
        "system",
    ),
    *(
        "temperature",
        "top_p",
        "max_tokens",
        "n",
        "role",
        "content",
        "type",
        "text",
        "tool_calls",
        "tool_call_id",
    ),
    *("function", "name", "arguments", "parameters", "input_schema", "previous_response_id", "instructions"),
    *("reward", "success", "error", "rollout_id", "mode", "metadata"),
]
known = st.recursive(
    plain | st.sampled_from(["user", "assistant", "tool", "system", "function", "text", "auto", "none", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KNOWN), inner, max_size=5),
    max_leaves=20,
)
requests = st.fixed_dictionaries(
    {},
    optional={
        name: st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer"])},
                optional={"content": known, "tool_call_id": known, "tool_calls": known, "type": known},
            ),
            max_size=4,
        )
        for name in ("messages", "input")
    }
    | {name: known for name in KNOWN if name not in ("messages", "input")},
)
bodies = st.binary(max_size=100) | st.one_of(requests, known, plain).map(
    lambda value: json.dumps(value, default=str).encode("utf-8", "replace")
)
ENDS = ["/chat/completions", "/responses", "/messages", "/models", "/v1/messages", ""]


def test_nothing_that_is_sent_makes_the_gateway_fail(loop_thread: Any) -> None:
    with loop_thread.serving(a_gateway(4096)) as gateway:

        @settings(max_examples=120, suppress_health_check=list(HealthCheck))
        @given(body=bodies, end=st.sampled_from(ENDS), odd=st.text("/%?.;v1abc", max_size=6))
        def sent(body: bytes, end: str, odd: str) -> None:
            status, answer = gateway.post(gateway.path + end, body)
            assert status < 500, answer
            status, answer = gateway.post(f"/{odd}", body)
            assert status < 500, answer
            status, answer = gateway.post("/rollouts", body, ADMIN)
            assert status < 500, answer

        sent()
        loop_thread.check()
