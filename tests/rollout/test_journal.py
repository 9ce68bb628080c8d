"""A crash does not pay twice: a later attempt takes recorded turns from the journal and goes on from there."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollwright.agents import JournalEntry, Session, Superseded
from rollwright.aio import run_virtual
from rollwright.engines.base import Generation, Prompt, Sampling
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.errors import FormatError
from rollwright.rollout import (
    Assignment,
    EnvManager,
    InflightLimit,
    RolloutContext,
    RolloutScheduler,
    ThreadSession,
)
from rollwright.rollout.attempt import StoreJournal
from rollwright.rollout.episode import Episode
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.lengths import LogNormalLength
from rollwright.store.memory import MemoryStore
from rollwright.store.records import RolloutConfig
from rollwright.trajectory import Message, Trajectory, Turn, VersionRun, floats

Pause = Callable[..., Awaitable[float]]

EPISODE = Episode("Lab", seed=7, mode="train", group_id="g0", group=0, member=0, run_seed=1)


def engine() -> SimulatedEngine:
    return SimulatedEngine(slots=4, tokens_per_second=10, lengths=LogNormalLength(20, 0.5))


async def killed_then_resumed(lab: Any, after: float) -> tuple[Trajectory, int, Any]:
    """One rollout; its first worker dies after some seconds without a word, a second one takes over."""
    store = MemoryStore()
    context = lab.context(store)
    await store.enqueue_rollout(
        episode_data(), rollout_id="r", config=RolloutConfig(unresponsive_seconds=30.0, max_attempts=3)
    )
    first = asyncio.create_task(EnvManager(context, "first").run_rollout_loop())
    await asyncio.sleep(after)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    recorded = len(await store.read_journal("r"))
    second = asyncio.create_task(EnvManager(context, "second").run_rollout_loop())
    await store.wait_for_rollouts(["r"], timeout=3600)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    trajectory = Trajectory.from_bytes((await store.get_trajectories(["r"]))["r"])
    await store.close()
    return trajectory, recorded, lab.activity


def episode_data() -> dict[str, Any]:
    return {name: getattr(EPISODE, name) for name in EPISODE.__struct_fields__}


@pytest.fixture
def crash_lab(lab: Any) -> Callable[..., Any]:
    def make(behaviour: Any, **more: Any) -> Any:
        it = lab(behaviour, turns=6, policy=engine(), **more)
        it.context = lambda store: RolloutContext(
            store, it.role, lambda _: it.env(), InflightLimit(10), it.activity
        )
        return it

    return make


@pytest.mark.parametrize("after", [0.5, 4.0, 9.0, 14.0])
def test_no_recorded_token_is_generated_twice(crash_lab: Any, pause: Pause, after: float) -> None:
    whole, _, alone = run_virtual(killed_then_resumed(crash_lab(lambda env: pause(1.0)), 10_000.0))
    trajectory, recorded, activity = run_virtual(
        killed_then_resumed(crash_lab(lambda env: pause(1.0)), after)
    )
    assert activity.replayed_turns == recorded
    assert activity.turns == 6
    assert activity.tokens == alone.tokens
    assert [turn.sampled_ids for turn in trajectory.turns] == [turn.sampled_ids for turn in whole.turns]
    assert [turn.outcome for turn in trajectory.turns] == [turn.outcome for turn in whole.turns]


def test_an_environment_that_comes_another_way_is_noticed_and_the_episode_starts_anew(
    crash_lab: Any, pause: Pause
) -> None:
    """The environment's reward depends on which copy it is, so the replayed turns do not come out the same."""
    it = crash_lab(lambda env: pause(1.0, reward=float(env.number)))
    trajectory, recorded, activity = run_virtual(killed_then_resumed(it, 9.0))
    assert recorded >= 2
    assert activity.replays_differed == 1
    assert activity.turns == recorded + 6
    assert {turn.outcome.reward for turn in trajectory.turns if turn.outcome} == {1.0}


def test_an_attempt_that_lost_its_rollout_cannot_record_another_turn(crash_lab: Any, pause: Pause) -> None:
    async def run() -> None:
        store = MemoryStore()
        await store.enqueue_rollout({}, rollout_id="r", config=RolloutConfig(unresponsive_seconds=5.0))
        claimed = await store.dequeue_rollout("first")
        assert claimed is not None
        journal = StoreJournal(store, "r", claimed.attempt.attempt_id)
        await journal.append(JournalEntry(10, Turn(id=0, after=None, extends=None), 1))
        await asyncio.sleep(10.0)
        await store.dequeue_rollout("second")
        with pytest.raises(Superseded):
            await journal.append(JournalEntry(11, Turn(id=1, after=0, extends=0), 2))
        assert len(await store.read_journal("r")) == 1
        await store.close()

    run_virtual(run())


def test_a_failed_attempt_is_retried_from_its_journal(crash_lab: Any, pause: Pause) -> None:
    """The engine fails for a while in turn 3; the turns before it are paid for once."""
    flaky = SimulatedEngine(slots=4, tokens_per_second=10, lengths=LogNormalLength(20, 0.5), failure_rate=0.2)
    it = crash_lab(lambda env: pause(1.0))
    it.policy = flaky

    async def run() -> Any:
        store = MemoryStore()
        await store.enqueue_rollout(episode_data(), rollout_id="r", config=RolloutConfig(max_attempts=20))
        manager = asyncio.create_task(EnvManager(it.context(store), "one").run_rollout_loop())
        await store.wait_for_rollouts(["r"], timeout=3600)
        manager.cancel()
        await asyncio.gather(manager, return_exceptions=True)
        await store.close()

    run_virtual(run())
    assert it.activity.failures["engine: EngineError"] >= 1
    assert it.activity.turns == 6


def test_an_entry_survives_its_bytes_and_foreign_bytes_are_refused() -> None:
    entry = JournalEntry(12, Turn(id=3, after=2, extends=2, text="go"), question=99)
    assert JournalEntry.from_bytes(entry.to_bytes()) == entry
    with pytest.raises(FormatError, match="not a journalentry"):
        JournalEntry.from_bytes(b"RWT\x01")


def test_a_users_function_is_an_agent_too(crash_lab: Any, pause: Pause) -> None:
    """An async and a plain function play rollouts whose input is any task; their reward is the episode's."""

    async def asynchronous(task: Any, session: Session) -> float:
        first = await session.generate([Message("user", task["question"])])
        await session.generate([Message("user", "sure?")], continues=first)
        return float(task["worth"])

    def plain(task: Any, session: ThreadSession) -> float:
        session.generate([Message("user", task["question"])])
        return float(task["worth"])

    def broken(task: Any, session: Any) -> float:
        raise LookupError("no idea")

    it = crash_lab(lambda env: pause(1.0))

    async def play(function: Any) -> tuple[str, Trajectory | None]:
        store = MemoryStore()

        async def role(claimed: Any) -> Assignment:
            return Assignment((await it.role_settings()), EchoPolicy(), function)

        context = RolloutContext(store, role, lambda _: it.env(), InflightLimit(1), it.activity)
        await store.enqueue_rollout(
            {"question": "six by seven?", "worth": 42}, rollout_id="r", config=RolloutConfig(max_attempts=1)
        )
        manager = asyncio.create_task(EnvManager(context, "one").run_rollout_loop())
        [done] = await store.wait_for_rollouts(["r"], timeout=60)
        manager.cancel()
        await asyncio.gather(manager, return_exceptions=True)
        kept = await store.get_trajectories(["r"])
        await store.close()
        return done.status, Trajectory.from_bytes(kept["r"]) if kept else None

    status, trajectory = asyncio.run(play(asynchronous))
    assert status == "succeeded"
    assert trajectory is not None
    assert (trajectory.reward, len(trajectory.turns), trajectory.turns[1].extends) == (42.0, 2, 0)
    status, trajectory = asyncio.run(play(plain))
    assert status == "succeeded"
    assert trajectory is not None
    assert (trajectory.reward, len(trajectory.turns)) == (42.0, 1)
    assert asyncio.run(play(broken)) == ("failed", None)
    assert it.activity.failures == {"agent: LookupError": 1}


class EchoPolicy:
    """Says back how long the prompt was."""

    renderer = BytesRenderer()
    version = 0
    pressure = 0

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        ids = self.renderer.encode(str(len(prompt.ids)))
        return Generation(
            "echo", ids, floats([0.0] * len(ids)), (VersionRun(0, len(ids)),), completion_tokens=len(ids)
        )

    async def close(self) -> None: ...


def test_the_scheduler_counts_what_was_replayed(lab: Any, pause: Pause) -> None:
    it = lab(lambda env: pause(1.0), policy=SimulatedEngine(slots=8, tokens_per_second=40, failure_rate=0.2))

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        batch = await scheduler.get_batch(16)
        assert it.activity.replayed_turns > 0
        assert it.activity.turns <= 2 * (len(batch.trajectories) + len(it.failures))

    it.run(experiment)
