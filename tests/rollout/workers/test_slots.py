"""Only a worker ends its own slots: one that other code cancels says so, fails what it held, and plays on."""

import asyncio
import logging
from typing import Any

import pytest

PATIENCE = 60.0


def tasks_of(worker_id: str, part: str) -> list["asyncio.Task[Any]"]:
    return [each for each in asyncio.all_tasks() if each.get_name().startswith(f"{worker_id}-{part}")]


@pytest.mark.parametrize("part", ["env", "heartbeat", "cancellations"])
async def test_a_task_of_a_worker_that_others_cancel_is_noticed_and_goes_on(
    workshop: Any, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    struck = 0

    async def agent(task: Any, session: Any) -> float:
        nonlocal struck
        if not struck:
            struck = len(found := tasks_of("worker-0", part))
            for each in found:
                each.cancel()
        await asyncio.sleep(0.01)
        return 1.0

    rollouts = await workshop.enqueue(6, max_attempts=5)
    with caplog.at_level(logging.WARNING):
        workshop.start(workshop.worker(agent, envs=2, heartbeat_interval=0.05))
        await workshop.store.wait_for_rollouts(rollouts, timeout=PATIENCE)
    found = await workshop.store.query_rollouts()
    assert {str(each.status) for each in found} == {"succeeded"}
    assert struck
    assert workshop.activity.slots_restarted == struck
    assert f"{part}" in caplog.text
    assert "cancelled by code that it plays" in caplog.text


async def test_an_attempt_whose_slot_was_cancelled_has_failed_with_the_reason(workshop: Any) -> None:
    async def agent(task: Any, session: Any) -> float:
        for each in tasks_of("worker-0", "env"):
            each.cancel()
        await asyncio.sleep(PATIENCE)
        return 1.0

    (rollout,) = await workshop.enqueue(1, max_attempts=1)
    workshop.start(workshop.worker(agent, envs=1))
    await workshop.store.wait_for_rollouts([rollout], timeout=PATIENCE)
    (attempt,) = await workshop.store.query_attempts(rollout)
    assert str(attempt.status) == "failed"
    assert "has cancelled tasks that are not its own" in (attempt.reason or "")


@pytest.mark.parametrize("raised", [asyncio.CancelledError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("threaded", [False, True], ids=["async", "thread"])
async def test_what_a_function_raises_fails_its_attempt_and_not_its_slot(
    workshop: Any, raised: type[BaseException], threaded: bool
) -> None:
    left = 3

    def strike() -> float:
        nonlocal left
        if left:
            left -= 1
            raise raised
        return 1.0

    async def agent(task: Any, session: Any) -> float:
        return strike()

    rollouts = await workshop.enqueue(4, max_attempts=5, retry_condition=("failed",))
    workshop.start(workshop.worker((lambda task, session: strike()) if threaded else agent, envs=1))
    await workshop.store.wait_for_rollouts(rollouts, timeout=PATIENCE)
    assert {str(each.status) for each in await workshop.store.query_rollouts()} == {"succeeded"}
    assert sum(workshop.activity.failures.values()) == 3


@pytest.mark.parametrize(
    "reward",
    [float("nan"), float("inf"), "1", [1.0], 10**400, 1 + 2j],
    ids=["nan", "infinite", "text", "list", "huge", "complex"],
)
async def test_a_function_that_returns_no_real_number_has_failed(workshop: Any, reward: Any) -> None:
    async def agent(task: Any, session: Any) -> float:
        return reward  # type: ignore[no-any-return]

    (rollout,) = await workshop.enqueue(1, max_attempts=1)
    workshop.start(workshop.worker(agent, envs=1))
    await workshop.store.wait_for_rollouts([rollout], timeout=PATIENCE)
    (attempt,) = await workshop.store.query_attempts(rollout)
    assert str(attempt.status) == "failed"
    assert "agent: FormatError: the reward that agent returned is" in (attempt.reason or "")
