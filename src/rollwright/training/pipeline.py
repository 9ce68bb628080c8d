"""The training loop, the same for synchronous and asynchronous runs.

Always true:
- A batch is recorded before it is trained on, and batches are trained in the order of the record. So the weights
  follow from the base model and the record alone, and the steps since a checkpoint can be repeated.
- The policy has received new weights before the next batch is requested. So the staleness of a token at hand-over is
  relative to the weights that the batch will change.
- A validation is played by one version: no weights change while it runs.

Whether rollouts run while a step is trained is not decided here: `get_batch` belongs to a scheduler that opens episodes
`async_generation_ratio` batches ahead. With 0 it opens none, and the loop is synchronous.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

BatchT = TypeVar("BatchT")


@dataclass(frozen=True)
class Cadence:
    """Decides after which steps to validate and to save a checkpoint. Pure."""

    steps: int
    """Steps of the whole run."""
    validation: bool = False
    """Whether there are environments for validation."""
    eval_steps: int | None = None
    """Steps between validations, starting with the base model. `None`: only the final model is validated."""
    checkpoint_steps: int = 1
    """Steps between checkpoints; there is always one at the end."""

    def validates(self, done: int) -> bool:
        between = self.eval_steps is not None and done % self.eval_steps == 0
        return self.validation and (between or done == self.steps)

    def checkpoints(self, done: int) -> bool:
        return done > 0 and (done % self.checkpoint_steps == 0 or done == self.steps)


@dataclass(frozen=True)
class Stages(Generic[BatchT]):
    """Callbacks of the loop. `step`: index from 0; `done`: number of finished steps."""

    get_batch: Callable[[], Awaitable[BatchT]]
    """Returns the next complete groups that are within the staleness bound."""
    record: Callable[[int, BatchT, float], None]
    """`(step, batch, seconds waited)`: records the batch durably before it is trained on."""
    train: Callable[[int, BatchT], Awaitable[None]]
    """`(step, batch)`: runs one step of the trainer; must not block the event loop."""
    update: Callable[[], Awaitable[None]]
    """Sends the trainer's weights to the policy; returns when all new tokens are sampled with them."""
    evaluate: Callable[[int], Awaitable[None]]
    """`(done)`: runs one validation."""
    checkpoint: Callable[[int], Awaitable[None]]
    """`(done)`: saves the trainer's state."""


@dataclass
class TimeSplit:
    """Seconds that the loop has spent in each stage."""

    rollout: float = 0.0
    """Waiting for batches. If it is small compared with `train`, generation is not the bottleneck."""
    train: float = 0.0
    update: float = 0.0
    validate: float = 0.0
    checkpoint: float = 0.0

    @property
    def total(self) -> float:
        return self.rollout + self.train + self.update + self.validate + self.checkpoint

    def row(self) -> dict[str, float]:
        return {name: round(seconds, 3) for name, seconds in vars(self).items()}


@dataclass
class Pipeline(Generic[BatchT]):
    """Runs the stages in order; its fields may be read while it runs."""

    cadence: Cadence
    stages: Stages[BatchT]
    split: TimeSplit = field(default_factory=TimeSplit)
    done: int = 0
    """Number of trained steps; a resumed run starts with those of the earlier one."""
    stage: str = "not started"
    """Stage that is running now."""
    on_stage: Callable[[str], None] = lambda stage: None
    """Called at the beginning of every stage, and with `done` at the end."""

    async def run(self, validated: Collection[int] = (), under_way: Collection[int] = ()) -> None:
        """Runs the remaining steps.

        `validated`: validations that an earlier run finished. `under_way`: validations that it began; these are finished
        even if the current settings do not schedule them.
        """
        stages = self.stages
        while True:
            due = self.cadence.validates(self.done) or self.done in under_way
            if due and self.done not in validated:
                await self._timed("validate", stages.evaluate(self.done))
            if self.done >= self.cadence.steps:
                break
            waited = self.split.rollout
            batch = await self._timed("rollout", stages.get_batch())
            stages.record(self.done, batch, self.split.rollout - waited)
            await self._timed("train", stages.train(self.done, batch))
            self.done += 1
            await self._timed("update", stages.update())
            if self.cadence.checkpoints(self.done):
                await self._timed("checkpoint", stages.checkpoint(self.done))
        self._enter("done")

    def _enter(self, stage: str) -> None:
        self.stage = stage
        self.on_stage(stage)

    async def _timed(self, stage: str, call: Awaitable[Any]) -> Any:
        clock = asyncio.get_running_loop().time
        self._enter(stage)
        began = clock()
        try:
            return await call
        finally:
            setattr(self.split, stage, getattr(self.split, stage) + clock() - began)


@dataclass
class LengthBias:
    """Lengths of trained episodes compared with those of all generated episodes.

    A scheduler that hands out the episodes that finish first trains on short ones. The staleness bound and group filters
    also drop episodes. This measures the resulting bias.
    """

    generated: int = 0
    """Number of finished episodes."""
    generated_tokens: int = 0
    trained: int = 0
    trained_tokens: int = 0

    def add_generated(self, tokens: int) -> None:
        self.generated += 1
        self.generated_tokens += tokens

    def add_trained(self, episodes: int, tokens: int) -> None:
        self.trained += episodes
        self.trained_tokens += tokens

    def add(self, other: "LengthBias") -> None:
        self.generated += other.generated
        self.generated_tokens += other.generated_tokens
        self.add_trained(other.trained, other.trained_tokens)

    @property
    def ratio(self) -> float | None:
        """Mean trained length divided by mean generated length: below 1, long episodes are underrepresented."""
        if not self.trained or not self.generated_tokens:
            return None
        return (self.trained_tokens / self.trained) / (self.generated_tokens / self.generated)

    def row(self) -> dict[str, float | None]:
        return {
            "generated": self.generated_tokens / self.generated if self.generated else None,
            "trained": self.trained_tokens / self.trained if self.trained else None,
            "ratio": self.ratio,
        }
