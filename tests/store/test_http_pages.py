"""Whatever the number, a caller of `HttpStore` gets what it would get of the store itself, and no request is large."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from rollwright.store.call_kinds import MAX_FILTER_IDS, MAX_ITEMS, MAX_PAGE_BYTES
from rollwright.store.errors import StoreError
from rollwright.store.http.client import HttpStore
from rollwright.store.http.decoding import MAX_VALUES, json_values, msgpack_values
from rollwright.store.http.server import StoreServer
from rollwright.store.memory import MemoryStore
from rollwright.store.records import EnqueueRequest

MANY = 2 * MAX_ITEMS + 5
IDS = [f"ro-{number:05d}" for number in range(MANY)]


class Stores:
    def __init__(self, behind: MemoryStore, http: HttpStore, url: str) -> None:
        self.behind = behind
        self.http = http
        self.url = url


@pytest.fixture
async def stores() -> AsyncIterator[Stores]:
    behind = MemoryStore()
    async with StoreServer(behind) as server:
        http = HttpStore(server.url)
        yield Stores(behind, http, server.url)
        await http.close()
    await behind.close()


def requests(ids: list[str] = IDS) -> list[EnqueueRequest]:
    return [EnqueueRequest(input={"n": number}, rollout_id=name) for number, name in enumerate(ids)]


async def test_many_rollouts_are_enqueued_found_claimed_and_cancelled(stores: Stores) -> None:
    enqueued = await stores.http.enqueue_many_rollouts(requests())
    assert [each.rollout_id for each in enqueued] == IDS
    for options in (
        {},
        {"sort_order": "desc"},
        {"limit": MANY - 3, "offset": 2},
        {"limit": 0},
        {"offset": 9},
    ):
        found, expected = [await each.query_rollouts(**options) for each in (stores.http, stores.behind)]  # type: ignore[arg-type]
        assert (list(found), found.total, found.limit, found.offset) == (
            list(expected),
            expected.total,
            expected.limit,
            expected.offset,
        )
    claimed = await stores.http.dequeue_many_rollouts(MANY, "worker")
    assert len(claimed) == MAX_ITEMS
    held = [(each.rollout_id, each.attempt.attempt_id) for each in claimed]
    unknown = [("ro-1", f"at-{number}") for number in range(MAX_ITEMS)]
    assert await stores.http.update_worker("worker", attempts=held + unknown) == unknown
    assert (await stores.http.query_rollouts(status="preparing", limit=0)).total == MAX_ITEMS
    assert await stores.http.cancel_rollouts(IDS, "enough") == IDS
    assert [each.rollout_id for each in await stores.http.wait_for_rollouts(IDS[::-1], timeout=9)] == IDS[
        ::-1
    ]
    assert len(await stores.http.read_completions(limit=MANY - 1)) == MANY - 1
    assert len(await stores.http.read_completions(timeout=9.0, limit=MANY + 1)) == MANY
    events = await stores.behind.read_events(limit=10**6)
    assert await stores.http.read_events(limit=10**6) == events
    assert await stores.http.read_events(limit=MANY) == events[:MANY]
    assert await stores.http.delete_rollouts(IDS[: MAX_ITEMS + 1]) == MAX_ITEMS + 1
    assert await stores.http.delete_finished(older_than=0, limit=MAX_ITEMS) == MAX_ITEMS
    assert await stores.http.delete_finished(older_than=0) == 4


async def test_trajectories_come_in_answers_of_a_bounded_size(stores: Stores) -> None:
    ids = IDS[:40]
    await stores.behind.enqueue_many_rollouts(requests(ids))
    for each in await stores.behind.dequeue_many_rollouts(len(ids), "worker"):
        report: dict[str, Any] = {"status": "succeeded", "trajectory": each.rollout_id.encode() * 100_000}
        if each.rollout_id == ids[20]:
            report = {"status": "failed"}
        await stores.behind.update_attempt(each.rollout_id, each.attempt.attempt_id, **report)
    expected = await stores.behind.get_trajectories(ids)
    assert sum(map(len, expected.values())) > 3 * MAX_PAGE_BYTES
    assert await stores.http.get_trajectories([*ids, "ro-none"]) == expected
    raw = await stores.http._connection.post("get_trajectories", msgspec.msgpack.encode({"rollout_ids": ids}))
    assert len(raw) < 3 * MAX_PAGE_BYTES


async def test_a_page_of_large_rollouts_ends_early(stores: Stores) -> None:
    large = [EnqueueRequest(input="x" * 1_000_000, rollout_id=name) for name in IDS[:30]]
    await stores.http.enqueue_many_rollouts(large)
    assert [each.rollout_id for each in await stores.http.query_rollouts()] == IDS[:30]
    raw = await stores.http._connection.post("query_rollouts", b"\x80")
    assert len(raw) < MAX_PAGE_BYTES + 100_000


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("query_rollouts", {"limit": MAX_ITEMS + 1}),
        ("query_rollouts", {"limit": -1}),
        ("query_rollouts", {"rollout_ids": ["x"] * (MAX_FILTER_IDS + 1)}),
        ("query_workers", {"limit": MAX_ITEMS + 1}),
        ("query_resources", {"limit": MAX_ITEMS + 1}),
        ("query_attempts", {"rollout_id": "x", "limit": MAX_ITEMS + 1}),
        ("read_events", {"limit": MAX_ITEMS + 1}),
        ("read_completions", {"limit": MAX_ITEMS + 1}),
        ("get_trajectories", {"rollout_ids": ["x"] * (MAX_ITEMS + 1)}),
        ("wait_for_rollouts", {"rollout_ids": ["x"] * (MAX_ITEMS + 1)}),
        ("cancel_rollouts", {"rollout_ids": ["x"] * (MAX_ITEMS + 1), "reason": ""}),
        ("delete_rollouts", {"rollout_ids": ["x"] * (MAX_ITEMS + 1)}),
        ("delete_finished", {"older_than": 0, "limit": MAX_ITEMS + 1}),
        ("dequeue_many_rollouts", {"limit": MAX_ITEMS + 1}),
        ("enqueue_many_rollouts", {"requests": [{"input": 1}] * (MAX_ITEMS + 1)}),
        ("update_worker", {"worker_id": "w", "attempts": [["x", "y"]] * (MAX_ITEMS + 1)}),
    ],
)
async def test_no_request_asks_for_more_than_a_page(stores: Stores, call: str, arguments: Any) -> None:
    with pytest.raises(StoreError, match="Expected"):
        await stores.http._connection.post(call, msgspec.msgpack.encode(arguments))


@pytest.mark.parametrize("packed", [True, False])
async def test_a_body_of_too_many_values_is_refused_however_small_they_are(packed: bool) -> None:
    import aiohttp

    many = {"resources": {"many": [[]] * (MAX_VALUES + 1)}}
    few = {"resources": {"text": "," * 100 + "x" * MAX_VALUES}}
    coder, kind = (msgspec.msgpack, "msgpack") if packed else (msgspec.json, "json")
    async with StoreServer(MemoryStore()) as server, aiohttp.ClientSession() as session:
        for body, status in ((many, 413), (few, 200)):
            async with session.post(
                f"{server.url}/v1/add_resources",
                data=coder.encode(body),
                headers={"Content-Type": f"application/{kind}"},
            ) as answer:
                assert answer.status == status, await answer.read()


def test_values_are_counted_in_every_form() -> None:
    samples: list[Any] = [
        None,
        [],
        {},
        {"a": 1},
        [1, -1, 200, 70_000, 2**40, -200, -70_000, -(2**40), 1.5, True],
        ["x" * length for length in (0, 31, 32, 255, 256, 65_535, 65_536)],
        [b"x" * length for length in (0, 255, 256, 65_535, 65_536)],
        [
            [1] * 15,
            [1] * 16,
            [1] * 65_536,
            {str(n): n for n in range(16)},
            {str(n): n for n in range(70_000)},
        ],
        msgspec.msgpack.Ext(5, b"12345"),
        [msgspec.msgpack.Ext(5, b"x" * length) for length in (1, 2, 4, 8, 16, 300, 70_000)],
    ]
    for sample in samples:
        packed = msgspec.msgpack.encode(sample)
        assert msgpack_values(packed, 10**9) == _values(sample)
        assert msgpack_values(packed, 3) <= 4


def test_no_json_text_holds_more_values_than_are_counted() -> None:
    for sample in (
        [],
        {},
        {"a": [1, {"b": [[], {}]}]},
        [[1] * 16, {str(n): [n] for n in range(70_000)}],
        "a,b",
    ):
        assert json_values(msgspec.json.encode(sample), 10**9) >= _values(sample) - _keys(sample)


def _values(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(_values, value))
    if isinstance(value, dict):
        return 1 + sum(1 + _values(each) for each in value.values())
    return 1


def _keys(value: Any) -> int:
    """JSON's keys are not counted apart from their values."""
    if isinstance(value, list):
        return sum(map(_keys, value))
    return len(value) + sum(map(_keys, value.values())) if isinstance(value, dict) else 0
