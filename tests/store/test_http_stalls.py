"""One caller of the store's server does not keep the others waiting, whatever it asks for."""

import asyncio
import http.client
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from rollwright.run.gc_tuning import short_collections
from rollwright.store.call_kinds import MAX_FILTER_IDS, MAX_ITEMS
from rollwright.store.http.decoding import MAX_VALUES, SMALL_BODY, BodyDecoder, json_values, msgpack_values
from rollwright.store.http.protocol import JSON, MSGPACK
from rollwright.store.http.server import StoreServer
from rollwright.store.memory import MemoryStore
from rollwright.store.records import EnqueueRequest

ROLLOUTS = 100_000


@asynccontextmanager
async def server(rollouts: int = ROLLOUTS) -> AsyncIterator[str]:
    store = MemoryStore()
    for start in range(0, rollouts, MAX_ITEMS):
        await store.enqueue_many_rollouts(
            [EnqueueRequest(input={"n": n}, rollout_id=f"ro-{n}") for n in range(start, start + MAX_ITEMS)]
        )
    with short_collections(whole=False):  # as `rollwright serve` has it
        async with StoreServer(store) as made:
            yield made.url.removeprefix("http://")


def post(place: str, call: str, body: bytes, kind: str = "json") -> int:
    connection = http.client.HTTPConnection(place, timeout=60)
    connection.request("POST", f"/v1/{call}", body, {"Content-Type": f"application/{kind}"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


IDS = [f"ro-{n}" for n in range(MAX_FILTER_IDS)]
CALLS: list[tuple[str, Any, int]] = [
    ("query_rollouts", {}, 200),
    ("query_rollouts", {"sort_by": "rollout_id", "sort_order": "desc", "offset": ROLLOUTS - 1}, 200),
    ("query_rollouts", {"rollout_id_contains": "99", "status": ["queuing"], "sort_by": "mode"}, 200),
    ("query_rollouts", {"rollout_ids": IDS}, 200),
    ("query_rollouts", {"rollout_ids": [*IDS, "x"]}, 422),
    ("query_rollouts", {"limit": -1}, 422),
    ("enqueue_many_rollouts", {"requests": [{"input": [n] * 80} for n in range(MAX_ITEMS)]}, 200),
    ("enqueue_many_rollouts", {"requests": [{"input": [n] * 1000} for n in range(MAX_ITEMS)]}, 413),
    ("dequeue_many_rollouts", {"limit": MAX_ITEMS, "worker_id": "w"}, 200),
    ("update_worker", {"worker_id": "w"}, 200),
    ("cancel_rollouts", {"rollout_ids": IDS[:MAX_ITEMS], "reason": "x"}, 200),
    ("read_events", {}, 200),
    ("delete_rollouts", {"rollout_ids": IDS[:MAX_ITEMS]}, 200),
    ("add_resources", {"resources": {"x": [[]] * (MAX_VALUES // 2 - 10)}}, 200),
    ("add_resources", {"resources": {"x": [[]] * (MAX_VALUES + 1)}}, 413),
    ("add_resources", {"resources": {"x": "y" * 20_000_000}}, 200),
    ("enqueue_many_rollouts", {"requests": [{"input": "y" * 60_000_000}]}, 200),
    ("enqueue_many_rollouts", {"requests": [{"input": 1, "metadata": {"k": "é" * 10_000_000}}]}, 200),
    ("enqueue_many_rollouts", {"requests": [{"input": 1, "rollout_id": "y" * 10_000_000}]}, 400),
    ("get_rollout_by_id", {"rollout_id": "y" * 10_000_000}, 422),
    ("batch", [{"call": "query_rollouts", "arguments": {"limit": 1}}] * 50, 200),
    ("batch", [{"call": "enqueue_many_rollouts", "arguments": {"requests": [{"input": 1}] * 60}}] * 500, 200),
    ("batch", [{"call": "statistics", "arguments": {}}] * 2000, 422),
]


def test_no_call_keeps_the_others_waiting(loop_thread: Any) -> None:
    with loop_thread.serving(server) as place:
        for call, arguments, status in CALLS:
            for coder, kind in ((msgspec.json, "json"), (msgspec.msgpack, "msgpack")):
                loop_thread.forget()
                found = post(place, call, coder.encode(arguments), kind)
                assert found == status, call
                loop_thread.check(call, kind)


def test_a_long_answer_comes_whole(loop_thread: Any) -> None:
    text = "".join(map(str, range(500_000)))
    with loop_thread.serving(partial(server, 0)) as place:
        connection = http.client.HTTPConnection(place, timeout=60)
        for _ in range(2):
            body = msgspec.json.encode({"requests": [{"input": text}]})
            connection.request(
                "POST", "/v1/enqueue_many_rollouts", body, {"Content-Type": "application/json"}
            )
            assert msgspec.json.decode(connection.getresponse().read())[0]["input"] == text
        connection.close()


def test_a_text_of_nothing_but_escapes_is_refused_unread(loop_thread: Any) -> None:
    """Each of them takes a decoder twenty times as long as a letter."""
    body = msgspec.json.encode({"requests": [{"input": "\n" * 30_000_000}]})
    with loop_thread.serving(partial(server, 0)) as place:
        assert post(place, "enqueue_many_rollouts", body) == 413
        assert (
            post(
                place, "enqueue_many_rollouts", msgspec.json.encode({"requests": [{"input": "a\n" * 99_999}]})
            )
            == 200
        )
    loop_thread.check()


async def test_large_bodies_are_decoded_one_at_a_time_and_small_ones_at_once() -> None:
    decoder, under_way, most = BodyDecoder(), 0, 0
    second = threading.Event()

    def decode(body: bytes) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        second.wait(0.05)  # a second one would come in meanwhile
        under_way -= 1
        return len(body)

    large = b" " * (SMALL_BODY + 1)
    waiting = [asyncio.create_task(decoder.decode(decode, large, json_values)) for _ in range(3)]
    while not under_way:
        await asyncio.sleep(0)
    assert await decoder.decode(len, b"[]", json_values) == 2
    assert not any(each.done() for each in waiting[1:])
    assert await asyncio.gather(*waiting) == [SMALL_BODY + 1] * 3
    assert most == 1


def test_many_wide_queries_at_once_let_small_calls_in_between(loop_thread: Any) -> None:
    """The small call is answered while most of the wide ones, asked before it, still wait."""
    done: list[int] = []
    with loop_thread.serving(partial(server, 20_000)) as place:

        def ask() -> None:
            done.append(post(place, "query_rollouts", b'{"sort_by": "rollout_id"}'))

        threads = [threading.Thread(target=ask) for _ in range(20)]
        for thread in threads:
            thread.start()
        while not done:
            time.sleep(0.001)
        assert post(place, "get_rollout_by_id", b'{"rollout_id": "ro-1"}') == 200
        answered_before = len(done)
        for thread in threads:
            thread.join()
    assert done == [200] * 20
    assert answered_before < 20


WORST = {
    "empty lists": [[]] * (MAX_VALUES // 2 - 10),
    "empty objects": [{}] * (MAX_VALUES // 2 - 10),
    "keys": {f"k{n}": n for n in range(MAX_VALUES // 2 - 10)},
    "pairs": [[1.5, None]] * (MAX_VALUES // 4 - 10),
    "escapes": "\n" * 1_500_000,
    "letters": "é😀" * 5_000_000,
}


@pytest.mark.parametrize("name", WORST)
@pytest.mark.parametrize("format", [JSON, MSGPACK], ids=["json", "msgpack"])
def test_the_most_that_a_body_may_hold_is_decoded_quickly(format: Any, name: str, loop_thread: Any) -> None:
    """A decoder keeps all threads waiting."""
    arguments = {"resources": {"x": WORST[name]}}
    body = (msgspec.json if format is JSON else msgspec.msgpack).encode(arguments)
    count = json_values if format is JSON else msgpack_values
    assert count(body, MAX_VALUES) <= MAX_VALUES
    times = []
    for _ in range(3):
        with short_collections(whole=False):
            began = time.thread_time()
            format.calls["add_resources"](body)
            times.append(time.thread_time() - began)
    assert min(times) < loop_thread.most_seconds()
