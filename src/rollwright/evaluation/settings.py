"""Settings of evaluations."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from rollwright.settings import Settings

Confidence = Annotated[float, Field(gt=0.5, lt=1)]


class EvaluationConfig(Settings):
    """What `rollwright eval` plays, and what it reports."""

    tags: list[str] = Field(default_factory=list)
    """Environments to evaluate on. Unset: those of `val_env_manager`, else of `train_env_manager`."""
    tasks: PositiveInt | list[PositiveInt] | None = None
    """Tasks in all, or of each tag in the order of `tags`. Unset: all rows of tags with `custom_envs.*.tasks`, and 100
    levels of others."""
    samples: PositiveInt = 1
    """Episodes of each task."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature. Unset: 0 with one sample, else `sampling.temperature`."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the probability mass that is sampled from. Unset: `sampling.top_p`."""
    k: list[PositiveInt] = Field(default_factory=list)
    """Values of k in pass@k, avg@k and majority@k. Unset: 1, 2, 4 … up to `samples`."""
    confidence: Confidence = 0.95
    """Confidence of all intervals."""
    half_width: PositiveFloat | None = None
    """Stop when the interval of the score is at most this far from its middle. The number of looks at it is fixed before,
    and the intervals are widened, so that stopping costs no coverage. Unset: all tasks are played."""
    first_look: Annotated[int, Field(ge=5)] = 20
    """Tasks before the first look."""
    difficulty: list[str] = Field(default_factory=list)
    """Earlier evaluations (run folders or their `report.json`), or `auto` for all others of the runs folder, whose results
    say how difficult tasks are. Tasks that tell most are then played first, and every result counts for all tasks of its
    difficulty. Unset: tasks are played in a shuffled order."""
    by: list[str] | None = None
    """Fields of the rows to break results down by. Unset: fields with a few distinct values."""
    cache: bool = True
    """Whether episodes that an earlier evaluation has played (same task, model, sampling and seed) are taken from its
    results."""

    @model_validator(mode="after")
    def _fits(self) -> "EvaluationConfig":
        if len(set(self.tags)) != len(self.tags):
            raise ValueError(f"tags: {self.tags} names a tag twice; each may stand once")
        if isinstance(self.tasks, list) and len(self.tasks) != len(self.tags):
            raise ValueError(
                f"tasks: {len(self.tasks)} numbers for {len(self.tags)} tags; one for each is needed"
            )
        if wrong := [each for each in self.k if each > self.samples]:
            raise ValueError(f"k: {wrong[0]} is more than samples, which is {self.samples}")
        return self

    @property
    def ks(self) -> list[int]:
        """Values of k, increasing."""
        if self.k:
            return sorted(set(self.k))
        powers = [2**place for place in range(self.samples.bit_length()) if 2**place <= self.samples]
        return sorted({*powers, self.samples})
