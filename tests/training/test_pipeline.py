"""The loop itself, without a model: its order, its cadence, and how old tokens may be, on a virtual clock."""

import asyncio
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.aio import run_virtual
from rollwright.config import build
from rollwright.rollout import Batch, Fate
from rollwright.run.run import Run
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.lengths import LogNormalLength
from rollwright.training.pipeline import Cadence, LengthBias, Pipeline, Stages

BATCH, GROUP_SIZE, STEPS = 32, 4, 12


class Diary:
    """Stages that only write down that they were called."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def stages(self) -> Stages[str]:
        def note(name: str) -> Any:
            async def call(*arguments: Any) -> str:
                self.entries.append(" ".join([name, *(str(each) for each in arguments[:1])]))
                return "batch"

            return call

        return Stages(
            get_batch=note("batch"),
            record=lambda step, batch, seconds: self.entries.append(f"record {step}"),
            train=note("train"),
            update=note("update"),
            evaluate=note("validate"),
            checkpoint=note("checkpoint"),
        )


async def test_a_batch_is_recorded_before_it_is_trained_on_and_weights_are_updated_before_the_next() -> None:
    diary = Diary()
    await Pipeline(Cadence(steps=3, validation=True, eval_steps=2, checkpoint_steps=2), diary.stages()).run()
    one = ["batch", "record {}", "train {}", "update"]
    assert diary.entries == [
        "validate 0",
        *(each.format(0) for each in one),
        *(each.format(1) for each in one),
        "checkpoint 2",
        "validate 2",
        *(each.format(2) for each in one),
        "checkpoint 3",
        "validate 3",
    ]


async def test_a_run_that_goes_on_repeats_no_step_and_no_validation() -> None:
    diary = Diary()
    pipeline = Pipeline(Cadence(steps=3, validation=True, eval_steps=1), diary.stages(), done=2)
    await pipeline.run(validated={0, 1, 2})
    assert [each for each in diary.entries if each.startswith(("train", "validate"))] == [
        "train 2",
        "validate 3",
    ]
    assert pipeline.done == 3


@given(steps=st.integers(1, 40), every=st.integers(1, 50))
def test_the_last_step_always_has_a_checkpoint_and_a_validation(steps: int, every: int) -> None:
    cadence = Cadence(steps=steps, validation=True, eval_steps=every, checkpoint_steps=every)
    assert cadence.checkpoints(steps)
    assert cadence.validates(steps)
    assert cadence.validates(0)
    assert not cadence.checkpoints(0)
    between = [done for done in range(1, steps) if cadence.checkpoints(done)]
    assert between == list(range(every, steps, every))


def test_without_eval_steps_only_the_final_model_is_validated() -> None:
    cadence = Cadence(steps=5, validation=True)
    assert [done for done in range(6) if cadence.validates(done)] == [5]
    assert not any(Cadence(steps=5, eval_steps=1).validates(done) for done in range(6))


class Lab:
    """The real scheduler and workers, a simulated engine with heavy-tailed answers, a train step that sleeps."""

    def __init__(self, ratio: float, train_seconds: float, *, batch: int = BATCH, steps: int = STEPS) -> None:
        self.ratio = ratio
        self.batch = batch
        self.steps = steps
        self.train_seconds = train_seconds
        self.engine = SimulatedEngine(
            slots=8, tokens_per_second=50.0, lengths=LogNormalLength(60.0, 1.2, longest=600)
        )
        self.ages: Counter[int] = Counter()
        """Sampled tokens by age at hand-over."""
        self.trained: list[str] = []
        self.pipeline: Pipeline[Batch] | None = None
        self.wall = 0.0

    def run(self) -> "Lab":
        run_virtual(self._run())
        return self

    async def _run(self) -> None:
        config = build(
            {
                "max_steps": self.steps,
                "rollout_batch_size": self.batch,
                "async_generation_ratio": self.ratio,
                "max_inflight": 12,
                "limits": {"generate_timeout": 1e6, "episode_timeout": 1e6},
                "custom_envs": {"FrozenLake": {"max_tokens_per_step": 600}},
                "train_env_manager": {"num_env_groups": 24, "group_size": GROUP_SIZE, "tags": ["FrozenLake"]},
            }
        )
        clock = asyncio.get_running_loop().time
        async with Run(config, policy=self.engine) as run:
            self.ledger = run.schedulers[0].ledger
            stages = Stages(
                run.get_batch, self._record, self._train, self._update, self._nothing, self._nothing
            )
            self.pipeline = Pipeline(Cadence(self.steps), stages)
            began = clock()
            await self.pipeline.run()
            self.wall = clock() - began

    def _record(self, step: int, batch: Batch, seconds: float) -> None:
        assert batch.version == step == self.engine.version
        self.trained += [group.group_id for group in batch.groups]
        for trajectory in batch.trajectories:
            for turn in trajectory.turns:
                for run in turn.versions:
                    self.ages[step - run.version] += run.count

    async def _train(self, step: int, batch: Batch) -> None:
        await asyncio.sleep(self.train_seconds)

    async def _update(self) -> None:
        self.engine.set_version(self.engine.version + 1)

    async def _nothing(self, done: int) -> None:
        pass


@pytest.mark.parametrize("batch", [GROUP_SIZE, BATCH], ids=["small_batches", "large_batches"])
@pytest.mark.parametrize("ratio", [0, 0.5, 1, 2])
def test_no_token_is_older_at_hand_over_than_the_bound_allows(ratio: float, batch: int) -> None:
    """Small batches are the hard case: versions pass by while a single answer is being sampled."""
    lab = Lab(ratio, train_seconds=10.0 * batch / BATCH, batch=batch, steps=STEPS * BATCH // batch).run()
    assert max(lab.ages) <= math.ceil(ratio)
    assert min(lab.ages) == 0
    assert batch < BATCH or max(lab.ages) == math.ceil(ratio), "the bound is used"
    assert len(lab.trained) == len(set(lab.trained)) == STEPS * BATCH // GROUP_SIZE


def test_a_synchronous_run_plays_exactly_what_it_trains_on() -> None:
    lab = Lab(0, train_seconds=10.0).run()
    assert lab.ledger.counts[Fate.DELIVERED] == lab.ledger.opened == STEPS * BATCH


def test_training_overlaps_rollouts_only_in_an_asynchronous_run() -> None:
    apart, together = Lab(0, train_seconds=30.0).run(), Lab(1, train_seconds=30.0).run()
    assert apart.pipeline is not None
    assert apart.wall == pytest.approx(apart.pipeline.split.rollout + STEPS * 30.0)
    assert together.wall < 0.75 * apart.wall


def test_the_time_split_accounts_for_the_whole_time() -> None:
    lab = Lab(1, train_seconds=5.0).run()
    assert lab.pipeline is not None
    assert lab.pipeline.split.total == pytest.approx(lab.wall)
    assert lab.pipeline.split.train == pytest.approx(STEPS * 5.0)


def test_the_length_bias_says_whether_long_episodes_are_missing() -> None:
    bias = LengthBias()
    assert bias.ratio is None
    for tokens in (10, 20, 60):
        bias.add_generated(tokens)
    bias.add_trained(episodes=2, tokens=30)
    assert bias.row() == {"generated": 30.0, "trained": 15.0, "ratio": 0.5}
