"""How the client sends: few requests for many calls, patience, and no claim left behind."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError
from rollwright.store.errors import AttemptRefused, ImpossibleChange, NotFound, StoreError, StoreUnavailable
from rollwright.store.http.client import MAX_WAITING_CLAIMS, HttpStore
from rollwright.store.http.retry import RetryRule
from rollwright.store.http.server import StoreServer
from rollwright.store.memory import MemoryStore
from rollwright.store.outage import Outage
from rollwright.store.records import RolloutStatus

LONG = 20.0
"""Far longer than the test may take."""


class CountingServer(StoreServer):
    """Counts the requests that reach it."""

    @property
    def requests(self) -> int:
        return self._server.server_state.total_requests


class Served:
    def __init__(self, behind: MemoryStore, server: CountingServer, store: HttpStore) -> None:
        self.behind = behind
        self.server = server
        self.store = store


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    behind = MemoryStore()
    async with CountingServer(behind) as server:
        store = HttpStore(server.url)
        yield Served(behind, server, store)
        await store.close()
    await behind.close()


async def test_calls_of_the_same_moment_share_a_request(served: Served) -> None:
    await asyncio.gather(*[served.store.enqueue_rollout(n, rollout_id=f"ro-{n}") for n in range(100)])
    assert served.server.requests == 1
    claimed = await asyncio.gather(*[served.store.dequeue_rollout(f"worker-{n}") for n in range(100)])
    assert served.server.requests == 2
    assert [each.input for each in claimed if each] == list(range(100))
    assert [each.attempt.worker_id for each in claimed if each] == [f"worker-{n}" for n in range(100)]


async def test_a_lone_call_is_sent_at_once(served: Served) -> None:
    for number in range(5):
        await served.store.enqueue_rollout(number)
        assert served.server.requests == number + 1


async def test_each_call_of_a_shared_request_gets_its_own_error(served: Served) -> None:
    await served.store.enqueue_rollout(None, rollout_id="ro-1")
    first = await served.store.dequeue_rollout("worker-0")
    assert first is not None
    await served.store.cancel_rollouts(["ro-1"], "enough")
    results = await asyncio.gather(
        served.store.update_attempt("ro-1", first.attempt.attempt_id, status="succeeded"),
        served.store.update_attempt("ro-9", "at-1"),
        served.store.update_rollout("ro-1", status="requeuing"),
        served.store.update_rollout("ro-1", metadata={"x": object()}),
        served.store.get_rollout_by_id("ro-1"),
        return_exceptions=True,
    )
    assert [type(each).__name__ for each in results] == [
        "AttemptRefused",
        "NotFound",
        "ImpossibleChange",
        "StoreError",
        "Rollout",
    ]


async def test_errors_say_the_same_as_without_a_network(served: Served) -> None:
    async def message(store: MemoryStore | HttpStore, kind: type[Exception], attempt_id: str) -> str:
        with pytest.raises(kind) as caught:
            await store.update_attempt("ro-1", attempt_id, status="succeeded", worker_id="worker-1")
        return str(caught.value)

    await served.store.enqueue_rollout(None, rollout_id="ro-1")
    claimed = await served.store.dequeue_rollout("worker-0")
    assert claimed is not None
    for kind, attempt_id in [(AttemptRefused, claimed.attempt.attempt_id), (NotFound, "at-9")]:
        assert await message(served.store, kind, attempt_id) == await message(served.behind, kind, attempt_id)
    for store in (served.store, served.behind):
        with pytest.raises(ImpossibleChange, match="ro-1 is preparing and cannot be set to succeeded"):
            await store.update_rollout("ro-1", status="succeeded")


async def test_a_large_trajectory_goes_through(served: Served) -> None:
    large = bytes(range(256)) * 8192
    started = await served.store.start_rollout(None, rollout_id="ro-1")
    await served.store.update_attempt(
        "ro-1", started.attempt.attempt_id, status="succeeded", trajectory=large
    )
    assert await served.store.get_trajectories(["ro-1"]) == {"ro-1": large}


async def test_more_callers_than_connections_are_all_served(served: Served) -> None:
    count = MAX_WAITING_CLAIMS * 2
    waiting = [
        asyncio.create_task(served.store.dequeue_rollout(f"worker-{n}", timeout=LONG)) for n in range(count)
    ]
    await asyncio.sleep(0.3)
    for number in range(count):
        await served.behind.enqueue_rollout(number)
    async with asyncio.timeout(LONG):
        claimed = await asyncio.gather(*waiting)
    assert sorted(each.input for each in claimed if each) == list(range(count))
    assert (await served.behind.statistics())["attempts"] == count


async def test_callers_beyond_the_connections_give_up_in_time(served: Served) -> None:
    first = [
        asyncio.create_task(served.store.dequeue_rollout(timeout=LONG)) for _ in range(MAX_WAITING_CLAIMS)
    ]
    await asyncio.sleep(0.2)
    async with asyncio.timeout(LONG / 2):
        assert await served.store.dequeue_rollout(timeout=0.05) is None
    for task in first:
        task.cancel()
    await asyncio.gather(*first, return_exceptions=True)


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.003, 0.01])
async def test_claims_of_cancelled_callers_go_back(served: Served, delay: float) -> None:
    for number in range(20):
        await served.behind.enqueue_rollout(number)
    asking = [asyncio.create_task(served.store.dequeue_rollout("worker-0")) for _ in range(20)]
    await asyncio.sleep(delay)
    for task in asking:
        task.cancel()
    got = [
        each
        for each in await asyncio.gather(*asking, return_exceptions=True)
        if not isinstance(each, BaseException)
    ]
    back = 20 - len(got)
    async with asyncio.timeout(LONG):
        others = [await served.behind.dequeue_rollout("worker-1", timeout=LONG) for _ in range(back)]
    assert None not in others


async def test_a_caller_that_hangs_up_leaves_the_line(served: Served) -> None:
    gone = HttpStore(served.server.url)
    waiting = asyncio.create_task(gone.dequeue_rollout("worker-0", timeout=LONG))
    await asyncio.sleep(0.1)
    await gone.close()
    assert await waiting is None
    await asyncio.sleep(0.1)
    await served.behind.enqueue_rollout(None, rollout_id="ro-1")
    rollout = await served.behind.get_rollout_by_id("ro-1")
    assert rollout is not None
    assert rollout.status is RolloutStatus.QUEUING


async def test_a_server_that_stops_lets_go_of_waiting_callers() -> None:
    behind = MemoryStore()
    port = 0
    async with StoreServer(behind) as server:
        store = HttpStore(server.url)
        port = int(server.url.rpartition(":")[2])
        waiting = asyncio.create_task(store.dequeue_rollout("worker-0", timeout=LONG))
        await asyncio.sleep(0.1)
        stopping = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - stopping < LONG / 2
    assert not waiting.done()
    async with StoreServer(behind, port=port), asyncio.timeout(LONG):
        await behind.enqueue_rollout(None, rollout_id="ro-1")
        claimed = await waiting
        assert claimed is not None
        await store.close()
    assert (await behind.statistics())["attempts"] == 1


async def test_closing_the_client_leaves_the_store_open(served: Served) -> None:
    await served.store.close()
    with pytest.raises(StoreError, match="closed"):
        await served.store.dequeue_rollout(timeout=1)
    assert (await served.behind.statistics())["queuing"] == 0


@given(
    tries=st.integers(1, 10_000),
    elapsed=st.floats(0, 1000),
    draw=st.floats(0, 1, exclude_max=True),
    rule=st.builds(
        RetryRule,
        give_up_after=st.floats(0, 100),
        first=st.floats(0, 1),
        factor=st.floats(1, 10),
        longest=st.floats(1, 10),
    ),
)
def test_a_wait_is_bounded_and_ends_by_the_limit(
    tries: int, elapsed: float, draw: float, rule: RetryRule
) -> None:
    delay = rule.delay(tries, elapsed, draw)
    if elapsed >= rule.give_up_after:
        assert delay is None
    else:
        assert delay is not None
        assert 0 <= delay <= rule.longest
        assert elapsed + delay <= rule.give_up_after * (1 + 1e-9)


@pytest.mark.parametrize("wrong", [{"first": -1.0}, {"first": 9.0}, {"factor": 0.5}, {"give_up_after": -1.0}])
def test_a_retry_rule_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="accepted"):
        RetryRule(**wrong)


def test_the_client_needs_no_web_framework() -> None:
    code = "import rollwright.store.http.client, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"fastapi", "starlette", "uvicorn", "sqlalchemy"} & set(done.stdout.split())


def test_the_examples_of_the_page_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "store_http.md").read_text(encoding="utf-8")
    examples = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    assert examples
    for program in examples:
        done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


async def test_a_server_that_cannot_be_reached_is_told_of_until_it_is_given_up() -> None:
    said: list[str] = []
    rule = RetryRule(give_up_after=0.3, first=0.01, longest=0.02)
    store = HttpStore("http://127.0.0.1:1", retry=rule, on_outage=said.append)
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1: .* \(after \d+ tries in 0 s\)"):
        await store.statistics()
    await store.close()
    assert len(said) == 1  # the next would come seconds later
    assert "; trying for 0 more seconds" in said[0]


def test_an_outage_is_told_every_few_seconds_and_when_it_is_over() -> None:
    said: list[str] = []
    outage = Outage("http://h", said.append)
    for second in range(12):
        outage.lasts("refused", float(second), 60.0 - second)
    outage.is_over()
    outage.is_over()
    assert said == [
        "http://h: refused; trying for 60 more seconds",
        "http://h: refused; trying for 55 more seconds",
        "http://h: refused; trying for 50 more seconds",
        "http://h answers again",
    ]
