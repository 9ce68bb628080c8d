"""A connection that breaks after the server has acted: nothing is done twice, nothing is stuck."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest

from rollwright.store.api import Store
from rollwright.store.errors import StoreUnavailable
from rollwright.store.http.client import HttpStore
from rollwright.store.http.retry import RetryRule
from rollwright.store.http.server import StoreServer
from rollwright.store.memory import MemoryStore
from rollwright.store.records import AttemptStatus, RolloutStatus

FAST = RetryRule(give_up_after=20, first=0.01, longest=0.05)
LONG = 20.0
"""Far longer than the test may take."""


class LossyProxy:
    """Passes bytes on, except that it swallows the next `lose` answers and breaks their connections."""

    def __init__(self, server_url: str) -> None:
        self._server = urlsplit(server_url)
        self.lose = 0
        self.lost = 0
        self.has_lost_one = asyncio.Event()

    async def start(self) -> str:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._server.port is not None
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._server.port)

        async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter, answers: bool) -> None:
            while data := await source.read(65536):
                if answers and self.lose > 0:
                    self.lose -= 1
                    self.lost += 1
                    self.has_lost_one.set()
                    break
                target.write(data)
            writer.close()
            back_writer.close()

        try:
            await asyncio.gather(pass_on(reader, back_writer, False), pass_on(back_reader, writer, True))
        except ConnectionError:
            return


@dataclass
class Lossy:
    store: HttpStore
    behind: MemoryStore
    proxy: LossyProxy

    async def losing(self, call: Awaitable[object]) -> object:
        """The call, made while its first two answers are lost."""
        self.proxy.lose, before = 2, self.proxy.lost
        answer = await call
        assert self.proxy.lost == before + 2
        return answer


@pytest.fixture
async def lossy() -> AsyncIterator[Lossy]:
    behind = MemoryStore()
    async with StoreServer(behind) as server:
        proxy = LossyProxy(server.url)
        store = HttpStore(await proxy.start(), retry=FAST)
        yield Lossy(store, behind, proxy)
        await store.close()
        await proxy.stop()
    await behind.close()


async def test_a_lost_answer_to_enqueue_enqueues_once(lossy: Lossy) -> None:
    rollout = await lossy.losing(lossy.store.enqueue_rollout({"n": 1}))
    [kept] = await lossy.behind.query_rollouts()
    assert kept == rollout


async def test_a_lost_answer_to_dequeue_claims_once(lossy: Lossy) -> None:
    for number in range(3):
        await lossy.store.enqueue_rollout(None, rollout_id=f"ro-{number}")
    claimed = await lossy.losing(lossy.store.dequeue_many_rollouts(2, "worker-0"))
    assert isinstance(claimed, list)
    assert [each.rollout_id for each in claimed] == ["ro-0", "ro-1"]
    counts = await lossy.behind.statistics()
    assert (counts["preparing"], counts["queuing"], counts["attempts"]) == (2, 1, 2)


async def test_a_lost_answer_to_a_waiting_dequeue_claims_once(lossy: Lossy) -> None:
    waiting = asyncio.create_task(lossy.store.dequeue_rollout("worker-0", timeout=LONG))
    await asyncio.sleep(0.1)
    lossy.proxy.lose = 1
    await lossy.behind.enqueue_rollout(None, rollout_id="ro-1")
    await lossy.behind.enqueue_rollout(None, rollout_id="ro-2")
    claimed = await waiting
    assert lossy.proxy.lost == 1
    assert claimed is not None
    assert claimed.rollout_id == "ro-1"
    assert (await lossy.behind.statistics())["attempts"] == 1


async def test_a_lost_answer_to_a_report_counts_once(lossy: Lossy) -> None:
    await lossy.store.enqueue_rollout(None, rollout_id="ro-1")
    claimed = await lossy.store.dequeue_rollout("worker-0")
    assert claimed is not None
    pair = ("ro-1", claimed.attempt.attempt_id)
    await lossy.losing(lossy.store.append_journal(*pair, [b"turn"]))
    assert await lossy.behind.read_journal("ro-1") == [b"turn"]
    await lossy.losing(lossy.store.update_attempt(*pair, status="succeeded", trajectory=b"turns"))
    [attempt] = await lossy.behind.query_attempts("ro-1")
    assert attempt.status is AttemptStatus.SUCCEEDED
    assert len(await lossy.behind.read_completions()) == 1


async def test_calls_that_shared_a_lost_answer_all_get_theirs(lossy: Lossy) -> None:
    for number in range(6):
        await lossy.store.enqueue_rollout(None, rollout_id=f"ro-{number}")
    lossy.proxy.lose = 1
    claimed = await asyncio.gather(*[lossy.store.dequeue_rollout(f"worker-{n}") for n in range(4)])
    assert lossy.proxy.lost == 1
    assert sorted(each.rollout_id for each in claimed if each) == ["ro-0", "ro-1", "ro-2", "ro-3"]
    assert (await lossy.behind.statistics())["attempts"] == 4


async def test_the_first_answer_is_given_again(lossy: Lossy) -> None:
    """To calls whose repeat finds nothing left to do."""
    for name in ("ro-1", "ro-2"):
        await lossy.store.enqueue_rollout(None, rollout_id=name)
    claimed = await lossy.store.dequeue_rollout("worker-0")
    assert claimed is not None
    store = lossy.store
    assert await lossy.losing(store.cancel_rollouts(["ro-1", "ro-2"], "enough")) == ["ro-1", "ro-2"]
    stopped = await lossy.losing(store.wait_for_cancellations("worker-0", timeout=0))
    assert stopped == [("ro-1", claimed.attempt.attempt_id)]
    assert await lossy.losing(store.delete_rollouts(["ro-1"])) == 1
    assert await lossy.losing(store.delete_finished(older_than=0)) == 1
    added = await lossy.losing(store.add_resources({"model": "a"}))
    assert list(await lossy.behind.query_resources()) == [added]


async def test_a_lost_answer_to_a_start_claims_once(lossy: Lossy) -> None:
    await lossy.losing(lossy.store.start_rollout({"n": 1}, worker_id="worker-0"))
    [rollout] = await lossy.behind.query_rollouts()
    assert rollout.status is RolloutStatus.PREPARING
    assert (await lossy.behind.statistics())["attempts"] == 1


@pytest.mark.parametrize("report", ["latest attempt", "requeuing"])
async def test_a_late_repeat_does_not_hit_the_next_attempt(lossy: Lossy, report: str) -> None:
    slow = HttpStore(lossy.store._connection.url, retry=RetryRule(first=0.3, longest=0.3))
    await lossy.behind.enqueue_rollout(None, rollout_id="ro-1")
    await lossy.behind.dequeue_rollout("worker-0")
    lossy.proxy.lose = 1
    if report == "requeuing":
        reporting = asyncio.create_task(_done(slow.update_rollout("ro-1", status="requeuing")))
    else:
        reporting = asyncio.create_task(_done(slow.update_attempt("ro-1", "latest", status="failed")))
    async with asyncio.timeout(LONG):
        await lossy.proxy.has_lost_one.wait()
        second = await lossy.behind.dequeue_rollout("worker-1", timeout=LONG)
        await reporting
    assert second is not None
    assert await lossy.behind.get_latest_attempt("ro-1") == second.attempt
    await slow.close()


async def _done(call: Awaitable[object]) -> None:
    await call


@pytest.mark.parametrize("wait", [0.0, LONG], ids=["at once", "waiting"])
async def test_a_claim_whose_caller_is_gone_goes_back(lossy: Lossy, wait: float) -> None:
    """The answer is lost and the caller stops before it can ask again."""
    slow = HttpStore(lossy.store._connection.url, retry=RetryRule(first=0.3, longest=0.3))
    await lossy.behind.enqueue_rollout(None, rollout_id="ro-1")
    lossy.proxy.lose = 1
    asking = asyncio.create_task(slow.dequeue_rollout("worker-0", timeout=wait))
    async with asyncio.timeout(LONG):
        await lossy.proxy.has_lost_one.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    async with asyncio.timeout(LONG):
        claimed = await lossy.behind.dequeue_rollout("worker-1", timeout=LONG)
    assert claimed is not None
    assert claimed.attempt.sequence_id == 2
    await slow.close()


async def test_a_server_that_never_answers_is_given_up(lossy: Lossy) -> None:
    lossy.proxy.lose = 1_000_000
    hasty = HttpStore(lossy.store._connection.url, retry=RetryRule(give_up_after=0.2, first=0.01))
    calls: list[Callable[[Store], Awaitable[object]]] = [
        lambda store: store.statistics(),
        lambda store: store.query_rollouts(),
        lambda store: store.read_completions(timeout=0.05),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1.* \(after \d+ tries in \d+ s\)"):
            await call(hasty)
    await hasty.close()
