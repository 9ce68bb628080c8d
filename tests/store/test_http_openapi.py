"""The OpenAPI page tells the truth, and nothing that it allows or forbids makes the server fail."""

import asyncio
import threading
from collections.abc import Iterator
from inspect import getdoc
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS, load_all_checks

from rollwright.store.api import Store
from rollwright.store.call_kinds import MAX_WAIT_SECONDS
from rollwright.store.calls import CALLS
from rollwright.store.http.openapi import document
from rollwright.store.http.server import StoreServer
from rollwright.store.memory import MemoryStore
from rollwright.store.records import EnqueueRequest

TOKEN = "secret"
SHORT_WAIT = 0.001
"""Generated waits are cut to this; a queue that stays empty would hold the test up."""

load_all_checks()
CHECKED = CHECKS.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
    ]
)


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """A server with a few rollouts, in a thread of its own: the generated requests are made without a loop."""
    ready = threading.Event()
    held: dict[str, Any] = {}

    async def main() -> None:
        store = MemoryStore()
        requests = [EnqueueRequest(input={"n": n}, rollout_id=name) for n, name in enumerate("01AB")]
        await store.enqueue_many_rollouts(requests)
        await store.dequeue_rollout("0", claim_id="0")
        async with StoreServer(store, token=TOKEN) as server:
            held.update(url=server.url, loop=asyncio.get_running_loop(), stop=asyncio.Event())
            ready.set()
            await held["stop"].wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(30)
    yield held["url"]
    held["loop"].call_soon_threadsafe(held["stop"].set)
    thread.join(30)
    assert not thread.is_alive()


schema = schemathesis.openapi.from_dict(document())


@schemathesis.serializer("application/msgpack")
def to_msgpack(context: Any, value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def cut_wait(body: Any) -> None:
    if isinstance(body, dict) and isinstance(wait := body.get("timeout"), int | float):
        body["timeout"] = SHORT_WAIT if SHORT_WAIT < wait <= MAX_WAIT_SECONDS else wait


@schema.parametrize()
@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_request_makes_the_server_fail(case: Any, server_url: str) -> None:
    cut_wait(case.body)
    case.call_and_validate(
        base_url=server_url, checks=CHECKED, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=20
    )


def test_every_call_has_its_path_and_the_description_of_its_method() -> None:
    paths = {path.removeprefix("/v1/"): each["post"] for path, each in document()["paths"].items()}
    assert set(paths) == set(CALLS) | {"withdraw_call", "batch"}
    for name in CALLS:
        promised = " ".join((getdoc(getattr(Store, name)) or "").split())
        assert paths[name]["summary"]
        assert promised.startswith(paths[name]["summary"])
