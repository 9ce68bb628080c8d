"""What an environment answers is checked where it comes in: a failure that names the environment, never a reward of 0."""

import asyncio
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from rollwright.config import build
from rollwright.envs.base import Reset, Step
from rollwright.rollout import Fate, RolloutScheduler
from rollwright.run.run import Run
from rollwright.store.memory import MemoryStore
from rollwright.trajectory import Trajectory

LIMITS = {"max_attempts": 2, "max_refills": 1}
SMALL = {"num_env_groups": 1, "group_size": 2}


def failures_of(it: Any, monkeypatch: pytest.MonkeyPatch, **methods: Any) -> set[str]:
    """Why the rollouts failed whose environment has these methods."""
    for name, method in methods.items():
        monkeypatch.setattr(type(it.env()), name, method)

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        with pytest.raises(Exception, match="dropped"):
            await scheduler.get_batch(2)
        assert scheduler.ledger.counts[Fate.DELIVERED] == 0

    it.run(experiment)
    return {reason for _, reason in it.failures}


@pytest.mark.parametrize(
    "reward",
    [math.nan, math.inf, -math.inf, None, "1", [1.0], 1e39],
    ids=["nan", "infinite", "minus_infinite", "none", "text", "list", "huge"],
)
def test_a_reward_that_is_no_finite_number_fails_the_attempt(
    lab: Any, pause: Any, reward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def step(self: Any, answer: str) -> Step:
        return Step("next", reward, False, False, {})

    (reason,) = failures_of(lab(pause, manager=SMALL, limits=LIMITS), monkeypatch, step=step)
    assert reason.startswith("environment: FormatError: environment Lab: the reward is ")


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (("next", 0.0, False, False, {}), "step() gave a tuple"),
        (None, "step() gave a NoneType"),
        (Step(b"next", 0.0, False, False, {}), "the observation is a bytes"),  # type: ignore[arg-type]
        (Step("next", 0.0, "no", False, {}), "terminated is a str"),  # type: ignore[arg-type]
        (Step("next", 0.0, False, None, {}), "truncated is a NoneType"),  # type: ignore[arg-type]
        (Step("next", 0.0, False, False, {"penalty": math.nan}), "the penalty is nan"),
        (Step("next", 0.0, False, False, {"action": 3}), "the action is a int"),  # type: ignore[typeddict-item]
        (Step("next", 0.0, False, False, {"success": "yes"}), "success is a str"),  # type: ignore[typeddict-item]
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_an_answer_of_another_shape_fails_the_attempt_and_says_what_is_wrong(
    lab: Any, pause: Any, answer: Any, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def step(self: Any, text: str) -> Any:
        return answer

    (reason,) = failures_of(lab(pause, manager=SMALL, limits=LIMITS), monkeypatch, step=step)
    assert reason.startswith("environment: ")
    assert word in reason


@pytest.mark.parametrize("first", [None, "level", Reset(7, {})], ids=["none", "text", "number"])  # type: ignore[arg-type]
def test_a_reset_that_shows_nothing_fails_the_attempt(
    lab: Any, pause: Any, first: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reset(self: Any, seed: int) -> Any:
        return first

    (reason,) = failures_of(lab(pause, manager=SMALL, limits=LIMITS), monkeypatch, reset=reset)
    assert reason.startswith("environment: FormatError: environment Lab: reset() gave a ")


def test_numbers_of_numpy_are_taken_for_what_they_are(
    lab: Any, pause: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def step(self: Any, answer: str) -> Any:
        return Step("over", np.float32(0.5), np.bool_(True), np.bool_(False), {"success": np.bool_(True)})  # type: ignore[arg-type, typeddict-item]

    it = lab(pause, manager=SMALL)
    monkeypatch.setattr(type(it.env()), "step", step)

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        batch = await scheduler.get_batch(2)
        assert [each.reward for each in batch.trajectories] == [0.5, 0.5]
        assert all(each.success is True for each in batch.trajectories)

    it.run(experiment)


@pytest.mark.parametrize("spoilt", ["nan", "garbage", "nothing"])
async def test_what_a_worker_of_others_commits_is_checked_before_it_counts(spoilt: str) -> None:
    """A worker that is not ours commits whatever it likes: its rollout has failed, and the run goes on."""
    config = build(
        {
            "policy": {"kind": "oracle"},
            "train_env_manager": {"num_env_groups": 1, "group_size": 2, "tags": ["FrozenLake"]},
        }
    )
    committed = 0

    class Spoiling(MemoryStore):
        async def update_attempt(self, *ids: Any, **report: Any) -> Any:
            return await super().update_attempt(*ids, **self._spoil(report))

        async def finish_and_dequeue(self, *ids: Any, **report: Any) -> Any:
            return await super().finish_and_dequeue(*ids, **self._spoil(report))

        def _spoil(self, report: dict[str, Any]) -> dict[str, Any]:
            nonlocal committed
            if report.get("trajectory") is not None and committed < 2:
                committed += 1
                report["trajectory"] = _spoilt(report["trajectory"], spoilt)
            return report

    failed: list[str] = []
    async with (
        asyncio.timeout(60),
        Run(config, store=Spoiling(), on_failed=lambda rollout, reason: failed.append(reason)) as run,
    ):
        batch = await run.get_batch()
        assert [each.reward for each in batch.trajectories] == [1.0, 1.0]
        assert len(failed) == run.ledger.counts[Fate.FAILED] == 2
    assert all(each.startswith("system: FormatError: ") for each in failed)


def _spoilt(encoded: bytes, how: str) -> bytes | None:
    if how == "nothing":
        return None
    if how == "garbage":
        return encoded[:-3]
    trajectory = Trajectory.from_bytes(encoded)
    turn = trajectory.turns[-1]
    assert turn.outcome is not None
    outcome = msgspec.structs.replace(turn.outcome, reward=math.nan)
    trajectory.turns[-1] = msgspec.structs.replace(turn, outcome=outcome)
    return trajectory.to_bytes()
