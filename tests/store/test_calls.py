"""A store call is defined once: its record and its method, and a handler in each backend. All else follows."""

import ast
import inspect
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from rollwright.store.api import Store
from rollwright.store.backend import Backend
from rollwright.store.call_kinds import MAX_ITEMS, LogCall, OnceCall, PagedCall, StoreCall
from rollwright.store.calls import (
    CALLS,
    AddResources,
    AppendJournal,
    CancelRollouts,
    DeleteFinished,
    DequeueManyRollouts,
    EnqueueManyRollouts,
    GetTrajectories,
    QueryRollouts,
    ReadCompletions,
    StartRequestedRollout,
    TrajectoryPage,
    UpdateAttempt,
    UpdateRollout,
    UpdateWorker,
)
from rollwright.store.errors import StoreError
from rollwright.store.http import client
from rollwright.store.http.client import HttpStore
from rollwright.store.http.openapi import document
from rollwright.store.http.protocol import FORMATS, Format
from rollwright.store.http.server import StoreServer
from rollwright.store.memory import MemoryStore
from rollwright.store.records import (
    AttemptStatus,
    CompletionEntry,
    EnqueueRequest,
    Page,
    Rollout,
    RolloutConfig,
    RolloutStatus,
)
from rollwright.store.sql import SqlStore

EXAMPLES: dict[str, dict[str, Any]] = {
    "enqueue_many_rollouts": {"requests": [EnqueueRequest({"n": 1}, rollout_id="r")]},
    "update_rollout": {"rollout_id": "r", "status": RolloutStatus.CANCELLED, "config": RolloutConfig()},
    "cancel_rollouts": {"rollout_ids": ["r"], "reason": "not needed"},
    "start_attempt": {"rollout_id": "r", "worker_id": "w"},
    "start_requested_rollout": {"request": EnqueueRequest(None, rollout_id="r")},
    "update_attempt": {"rollout_id": "r", "attempt_id": "a", "status": AttemptStatus.FAILED, "reason": "x"},
    "finish_and_dequeue": {"rollout_id": "r", "attempt_id": "a", "status": AttemptStatus.SUCCEEDED},
    "update_worker": {"worker_id": "w", "attempts": [("r", "a")]},
    "wait_for_cancellations": {"worker_id": "w"},
    "append_journal": {"rollout_id": "r", "attempt_id": "a", "entries": [b"turn"]},
    "read_journal": {"rollout_id": "r"},
    "clear_journal": {"rollout_id": "r", "attempt_id": "a"},
    "get_trajectories": {"rollout_ids": ["r"], "failed": True},
    "release_trajectories": {"rollout_ids": ["r"]},
    "wait_for_rollouts": {"rollout_ids": ["r"]},
    "get_rollout_by_id": {"rollout_id": "r"},
    "get_latest_attempt": {"rollout_id": "r"},
    "query_rollouts": {"status": [RolloutStatus.FAILED], "sort_by": "mode", "limit": 3},
    "query_attempts": {"rollout_id": "r"},
    "get_worker_by_id": {"worker_id": "w"},
    "add_resources": {"resources": {"a": 1}, "resources_id": "s"},
    "update_resources": {"resources_id": "s", "resources": {"a": 2}},
    "get_resources_by_id": {"resources_id": "s", "version": 1},
    "delete_rollouts": {"rollout_ids": ["r"]},
    "delete_finished": {"older_than": 5.0},
}
"""Arguments of each call that needs some."""

every_call = pytest.mark.parametrize("kind", CALLS.values(), ids=CALLS)


def example(kind: type[StoreCall[Any]]) -> StoreCall[Any]:
    return kind(**EXAMPLES.get(kind.name, {}))


def test_every_record_has_a_method_of_its_name_on_the_store_and_no_method_is_without_a_record() -> None:
    composed = {"enqueue_rollout", "dequeue_rollout", "start_rollout"}
    methods = {name for name, _ in inspect.getmembers(Store, inspect.iscoroutinefunction)}
    assert methods - {"close"} == set(CALLS) | composed


@every_call
@pytest.mark.parametrize("backend", [MemoryStore, SqlStore])
def test_every_call_has_a_handler_in_each_backend_that_returns_its_result_type(
    backend: type[Backend], kind: type[StoreCall[Any]]
) -> None:
    hints = get_type_hints(backend.handlers[kind])
    assert hints["call"] is kind
    assert hints["return"] == (type(None) if kind.result is None else kind.result)


@every_call
def test_every_method_returns_the_result_type_of_its_record(kind: type[StoreCall[Any]]) -> None:
    returned = get_type_hints(getattr(Store, kind.name))["return"]
    assert returned == (type(None) if kind.result is None else kind.result)


@every_call
def test_every_call_is_in_the_openapi_document_with_all_its_fields(kind: type[StoreCall[Any]]) -> None:
    operation = document()["paths"][f"/v1/{kind.name}"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rpartition("/")[2]
    described = document()["components"]["schemas"][name]["properties"]
    assert set(described) == set(kind.__struct_fields__)


@every_call
@pytest.mark.parametrize("kind_of_body", FORMATS.values(), ids=FORMATS)
def test_every_record_survives_its_way_over_the_wire(
    kind: type[StoreCall[Any]], kind_of_body: Format
) -> None:
    call = example(kind)
    assert kind_of_body.calls[kind.name](kind_of_body.encode(call)) == call


class Recorder(MemoryStore):
    """Keeps the calls that it executes."""

    def __init__(self) -> None:
        super().__init__()
        self.executed: list[StoreCall[Any]] = []

    def execute(self, call: StoreCall[Any]) -> Any:
        self.executed.append(call)
        return super().execute(call)


@pytest.fixture
async def remote() -> AsyncIterator[tuple[HttpStore, Recorder]]:
    behind = Recorder()
    async with StoreServer(behind, token="secret") as server:
        store = HttpStore(server.url, token="secret")
        yield store, behind
        await store.close()
    await behind.close()


@every_call
async def test_every_call_reaches_the_store_behind_a_server_and_brings_back_what_it_returned(
    kind: type[StoreCall[Any]], remote: tuple[HttpStore, Recorder]
) -> None:
    store, behind = remote
    alone = MemoryStore()
    outcomes = []
    for each in (store, alone):
        try:
            outcomes.append(type(await each.execute(example(kind))))
        except StoreError as error:
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1]
    [executed] = behind.executed
    given = EXAMPLES.get(kind.name, {})
    received = {name: getattr(executed, name) for name in given}
    assert msgspec.to_builtins(received) == msgspec.to_builtins(given)
    await alone.close()


def test_nothing_of_a_call_is_declared_in_the_http_package() -> None:
    names = set(CALLS) | {kind.__name__ for kind in CALLS.values()}
    for file in Path(inspect.getfile(client)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.name not in names, f"{file.name} declares {node.name}"
            elif isinstance(node, ast.Name):
                assert node.id not in names, f"{file.name} knows {node.id}"
            elif isinstance(node, ast.Constant):
                assert node.value not in names, f"{file.name} names {node.value!r}"


def test_a_mistake_is_found_where_the_record_is_made_and_where_it_is_decoded() -> None:
    with pytest.raises(StoreError, match="limit=0 is not 1 or more"):
        DequeueManyRollouts(0)
    with pytest.raises(StoreError, match="comes with a final status, not with running"):
        UpdateAttempt("r", "a", AttemptStatus.RUNNING, trajectory=b"turns")
    body = msgspec.json.encode({"rollout_id": "r", "config": {"max_attempts": 0}})
    with pytest.raises(StoreError, match="max_attempts=0 is not 1 or more"):
        msgspec.json.decode(body, type=UpdateRollout)
    with pytest.raises(msgspec.ValidationError, match="worker_id"):
        msgspec.json.decode(b'{"worker_id": "no blanks"}', type=UpdateWorker)


# -- one call as several requests ---------------------------------------------------------------------


def drive(call: StoreCall[Any], reply: Any) -> tuple[list[Any], Any]:
    """The requests that a client makes for a call, and its result; `reply` maps a request to its reply."""
    requests: list[Any] = []
    parts: Generator[Any, Any, Any] = call.parts()
    try:
        requests.append(next(parts))
        while True:
            requests.append(parts.send(reply(requests[-1])))
    except StopIteration as end:
        return requests, end.value


@every_call
def test_every_call_fits_into_one_request_or_says_how_it_is_cut(kind: type[StoreCall[Any]]) -> None:
    call = example(kind)
    cut = isinstance(call, PagedCall | GetTrajectories)
    assert call.fits() is not cut


def test_a_long_list_is_sent_in_portions_each_with_an_idempotency_key_of_its_own() -> None:
    ids = [f"r{number}" for number in range(2 * MAX_ITEMS + 1)]
    call = CancelRollouts(ids, "enough")
    assert not call.fits()
    requests, result = drive(call, lambda each: each.rollout_ids)
    assert [len(each.rollout_ids) for each in requests] == [MAX_ITEMS, MAX_ITEMS, 1]
    assert len({each.call_id for each in requests} - {None}) == 3
    assert result == ids


def test_large_rollouts_are_enqueued_a_few_at_a_time() -> None:
    call = EnqueueManyRollouts([EnqueueRequest("x" * 40_000) for _ in range(5)]).repeatable()
    requests, result = drive(call, lambda each: each.requests)
    assert [len(each.requests) for each in requests] == [2, 2, 1]
    assert result == call.requests


def test_pages_are_read_to_the_end_and_an_item_that_moved_between_two_is_in_the_result_once() -> None:
    rows = [Rollout(f"r{number}", None, RolloutStatus.QUEUING, 0.0) for number in range(MAX_ITEMS + 10)]

    def page(call: QueryRollouts) -> Page[Rollout]:
        start = max(0, call.offset - 1)  # one row has come in before the second page is read
        return Page(rows[start : start + call.limit], len(rows) + 1, call.limit, call.offset)

    requests, result = drive(QueryRollouts(limit=-1), page)
    assert [(each.offset, each.limit) for each in requests] == [(0, MAX_ITEMS), (MAX_ITEMS, MAX_ITEMS)]
    assert [each.rollout_id for each in result] == [each.rollout_id for each in rows]


def test_a_log_is_read_on_without_waiting_once_something_is_there() -> None:
    def read(call: ReadCompletions) -> list[CompletionEntry]:
        last = min(call.after + call.limit, MAX_ITEMS + 5)
        return [CompletionEntry(n, "r", None, RolloutStatus.FAILED) for n in range(call.after + 1, last + 1)]

    requests, result = drive(ReadCompletions(9.0, limit=5 * MAX_ITEMS), read)
    assert [(each.after, each.timeout) for each in requests] == [(0, 9.0), (MAX_ITEMS, 0.0)]
    assert [each.cursor for each in result] == list(range(1, MAX_ITEMS + 6))


def test_trajectories_that_a_reply_could_not_hold_are_asked_for_again() -> None:
    def read(call: GetTrajectories) -> TrajectoryPage:
        return TrajectoryPage({call.rollout_ids[0]: b"turns"}, call.rollout_ids[1:])

    requests, result = drive(GetTrajectories(["a", "b", "a", "c"]), read)
    assert [each.rollout_ids for each in requests] == [["a", "b", "c"], ["b", "c"], ["c"]]
    assert result == dict.fromkeys("abc", b"turns")


def test_retention_goes_on_until_a_request_finds_fewer_than_it_may_delete() -> None:
    replies = iter([MAX_ITEMS, 7])
    requests, result = drive(DeleteFinished(5.0, 10_000), lambda _: next(replies))
    assert [each.limit for each in requests] == [MAX_ITEMS, MAX_ITEMS]
    assert result == MAX_ITEMS + 7


@every_call
def test_a_call_that_must_not_be_executed_twice_gets_an_idempotency_key(kind: type[StoreCall[Any]]) -> None:
    call = example(kind).repeatable()
    if isinstance(call, OnceCall) and not isinstance(call, UpdateAttempt):
        assert call.call_id is not None
    if isinstance(call, LogCall | PagedCall):
        assert call == example(kind)


def test_a_repeatable_call_names_all_that_it_creates() -> None:
    named = StartRequestedRollout(EnqueueRequest(None)).repeatable()
    assert named.request.rollout_id is not None
    assert named.claim_id is not None
    assert AddResources({}).repeatable().resources_id is not None
    assert AppendJournal("r", "a", []).repeatable().append_id is not None
    assert UpdateAttempt("r", "latest").repeatable().call_id is not None
    assert UpdateAttempt("r", "a").repeatable().call_id is None
