"""Whatever the code of an environment, policy, agent or tool raises ends its attempt; no slot is lost, nothing hangs."""

import asyncio
import concurrent.futures
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from rollwright.engines.base import Generation, Prompt, Sampling
from rollwright.envs.base import Reset
from rollwright.envs.threaded import BlockingRunner
from rollwright.errors import RollwrightError
from rollwright.rollout import Fate, RolloutScheduler
from rollwright.rollout.branching import FixedFanOut
from rollwright.rollout.tree import TreeStrategy
from rollwright.simulation.players import RandomPlayer

FAILURES = 7
"""Attempts that fail before the others are left alone: more than there are slots."""

SLOTS = {"num_env_groups": 1, "group_size": 2}

RAISED: list[Callable[[], BaseException]] = [
    asyncio.CancelledError,
    concurrent.futures.CancelledError,
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    StopIteration,
    StopAsyncIteration,
    asyncio.TimeoutError,
    lambda: BaseExceptionGroup("several", [SystemExit(3), ValueError("x")]),
]


def name(make: Callable[[], BaseException]) -> str:
    return type(make()).__name__


class Trouble:
    """Raises the same thing so many times, and nothing any more then."""

    def __init__(self, make: Callable[[], BaseException], times: int = FAILURES) -> None:
        self._make = make
        self.left = times

    def strike(self) -> None:
        if self.left:
            self.left -= 1
            raise self._make()


def check(lab: Any, expected: str | None = None) -> None:
    """A batch comes, as many attempts failed as there was trouble, and nothing stands for a reward."""

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        async with asyncio.timeout(10_000):  # of virtual time: a slot that is lost would leave it waiting
            batch = await scheduler.get_batch(2)
        assert [each.reward for each in batch.trajectories] == [2.0, 2.0]
        assert sum(it.activity.failures.values()) == FAILURES
        if expected is not None:
            assert set(it.activity.failures) == {expected}
        assert scheduler.ledger.counts[Fate.FAILED] == 0

    lab.run(experiment)


LIMITS = {"max_attempts": 20}


@pytest.mark.parametrize("make", RAISED, ids=name)
def test_what_a_step_raises_is_a_failure_of_the_attempt(lab: Any, pause: Any, make: Any) -> None:
    trouble = Trouble(make)

    async def behave(env: Any) -> float:
        trouble.strike()
        return await pause(1.0, reward=1.0)

    it = lab(behave, manager=SLOTS, limits=LIMITS)
    check(it)
    assert all(each.startswith("environment: ") for each in it.activity.failures)


@pytest.mark.parametrize("make", RAISED[:5], ids=name)
@pytest.mark.parametrize("where", ["reset", "close"])
def test_what_reset_and_close_raise_touches_nobody_else(
    lab: Any, pause: Any, make: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble, late = Trouble(make), Trouble(make, FAILURES)
    it = lab(lambda env: pause(1.0, reward=1.0), manager=SLOTS, limits=LIMITS)
    made = it.env
    kind = type(made())
    reset, close = kind.reset, kind.close

    async def bad_reset(self: Any, seed: int) -> Reset:
        trouble.strike()
        return await reset(self, seed)

    async def bad_close(self: Any) -> None:
        await close(self)
        late.strike()

    monkeypatch.setattr(kind, "reset", bad_reset)
    if where == "close":
        monkeypatch.setattr(kind, "close", bad_close)
    check(it)
    assert it.activity.abandoned_envs == (FAILURES if where == "close" else 0)


@pytest.mark.parametrize("make", RAISED, ids=name)
def test_what_a_policy_raises_is_a_failure_of_the_attempt(lab: Any, pause: Any, make: Any) -> None:
    trouble = Trouble(make)

    class Bad(RandomPlayer):
        async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
            trouble.strike()
            return await super().generate(prompt, sampling)

    it = lab(lambda env: pause(1.0, reward=1.0), manager=SLOTS, limits=LIMITS, policy=Bad())
    check(it)
    assert all(each.startswith("engine: ") for each in it.activity.failures)


def test_a_future_that_was_cancelled_elsewhere_is_no_cancellation_of_the_attempt(
    lab: Any, pause: Any
) -> None:
    left = FAILURES

    async def behave(env: Any) -> float:
        nonlocal left
        if left:
            left -= 1
            shared: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            shared.cancel()
            await shared
        return await pause(1.0, reward=1.0)

    check(lab(behave, manager=SLOTS, limits=LIMITS), "environment: CancelledError")


def test_code_that_cancels_the_task_it_runs_in_ends_its_attempt_alone(lab: Any, pause: Any) -> None:
    left = FAILURES

    async def behave(env: Any) -> float:
        nonlocal left
        if left:
            left -= 1
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        return await pause(1.0, reward=1.0)

    check(lab(behave, manager=SLOTS, limits=LIMITS), "system: CancelledError")


def test_a_failure_for_good_says_what_was_raised(lab: Any, pause: Any) -> None:
    async def behave(env: Any) -> float:
        raise asyncio.CancelledError

    it = lab(behave, manager=SLOTS, limits={"max_attempts": 2, "max_refills": 1})

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        with pytest.raises(Exception, match="groups in a row were dropped"):
            await scheduler.get_batch(2)
        (reason,) = {reason for _, reason in it.failures}
        assert reason == (
            "environment: CancelledError: raised by the code itself; nobody had cancelled the attempt"
        )

    it.run(experiment)


@pytest.mark.parametrize("make", RAISED, ids=name)
async def test_what_code_in_a_thread_raises_reaches_its_caller_as_an_error(make: Any) -> None:
    def call() -> None:
        raise make()

    runner = BlockingRunner("env")
    try:
        async with asyncio.timeout(60):
            with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it is, it is an error
                await runner.run(call)
            assert name(make) in f"{raised.type.__name__}: {raised.value}"
            assert await runner.run(lambda: 1) == 1, "it goes on"
    finally:
        runner.close()


def test_a_tree_whose_branch_raises_is_a_failure_of_the_attempt(lab: Any, pause: Any) -> None:
    trouble = Trouble(asyncio.CancelledError)

    async def behave(env: Any) -> float:
        await pause(0.1)
        trouble.strike()
        return await pause(1.0, reward=1.0)

    it = lab(behave, manager=SLOTS, limits=LIMITS)
    plain = it.settings
    forked: dict[str, Any] = {}

    def settings(episode: Any) -> Any:
        return forked.setdefault(
            episode.mode, replace(plain(episode), strategy=TreeStrategy(FixedFanOut(2, 1)))
        )

    it.settings = settings

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        batch = await scheduler.get_batch(2)
        assert len(batch.trajectories) == 2
        assert set(it.activity.failures) == {"environment: CancelledError"}

    it.run(experiment)


@pytest.mark.parametrize("make", RAISED, ids=name)
def test_a_filter_that_raises_ends_the_run_with_its_name(
    lab: Any, pause: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(group: Any) -> None:
        raise make()

    module: Any = ModuleType("raising_filter")
    module.judge = judge
    monkeypatch.setitem(sys.modules, "raising_filter", module)
    it = lab(lambda env: pause(1.0, reward=1.0), manager={**SLOTS, "group_filter": "raising_filter:judge"})

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        with pytest.raises(RollwrightError, match=f"group_filter: raising_filter:judge raised {name(make)}"):
            await scheduler.get_batch(2)

    it.run(experiment)
