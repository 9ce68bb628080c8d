"""How many environments of which kind run, and how they are grouped."""

from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from rollwright.config.filters import AnyFilterConfig, by_name
from rollwright.settings import Settings

DEFAULT_MAX_STEPS = 10
"""Action limit of the built-in games, as their levels are made to be solvable within it."""


class EnvManagerConfig(Settings):
    """Groups of environments. All members of a group have the same configuration and seed."""

    num_env_groups: PositiveInt
    """Groups that run at the same time."""
    group_size: PositiveInt = 1
    """Trajectories that make a group complete."""
    tags: Annotated[list[str], Field(min_length=1)]
    """Which environments to play."""
    num_groups_partition: list[PositiveInt] | None = None
    """Groups for each tag, in the order of `tags`. Unset: split evenly, the remainder going to the first tags."""
    max_env_num_per_worker: PositiveInt | None = None
    """Most environments that one worker runs. Unset: one worker runs them all."""
    group_size_redundancy: Annotated[int, Field(ge=0)] = 0
    """Extra members started in each group; the first `group_size` to finish count, the rest are cancelled."""
    min_group_size: PositiveInt | None = None
    """Fewest members with which a group may stand when others failed for good. Unset: all of `group_size`."""
    group_filter: str | None = None
    """Which complete groups to leave out: `zero_variance`, or a function of one's own as `module:function`."""
    filters: list[AnyFilterConfig] = Field(default_factory=list)
    """What else is left out of the loss, the batch or the baseline; a name alone takes every default."""

    @field_validator("filters", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return by_name(value)

    @model_validator(mode="after")
    def _fits(self) -> "EnvManagerConfig":
        if len(set(self.tags)) != len(self.tags):
            raise ValueError(f"tags: {self.tags} names a tag twice; each may stand once")
        if self.num_groups_partition is None:
            if len(self.tags) > self.num_env_groups:
                raise ValueError(
                    f"num_env_groups: {self.num_env_groups} groups cannot be split over {len(self.tags)} tags; "
                    f"at least {len(self.tags)} are needed"
                )
        elif len(self.num_groups_partition) != len(self.tags):
            raise ValueError(
                f"num_groups_partition: {len(self.num_groups_partition)} numbers for {len(self.tags)} tags; "
                "one for each tag is needed"
            )
        elif sum(self.num_groups_partition) != self.num_env_groups:
            raise ValueError(
                f"num_groups_partition: {self.num_groups_partition} sums to {sum(self.num_groups_partition)}, "
                f"but num_env_groups is {self.num_env_groups}"
            )
        if self.min_group_size is not None and self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size: {self.min_group_size} is more than group_size, which is {self.group_size}"
            )
        return self

    @property
    def partition(self) -> list[int]:
        """Groups for each tag, with the even split worked out."""
        if self.num_groups_partition is not None:
            return self.num_groups_partition
        share, rest = divmod(self.num_env_groups, len(self.tags))
        return [share + (place < rest) for place in range(len(self.tags))]

    @property
    def num_envs(self) -> int:
        """Environments that run at the same time."""
        return self.num_env_groups * (self.group_size + self.group_size_redundancy)

    def slot_tags(self) -> list[str]:
        """The tag of each group slot, interleaved so that any run of slots is close to the partition."""
        left = dict(zip(self.tags, self.partition, strict=True))
        whole = dict(left)
        slots: list[str] = []
        while len(slots) < self.num_env_groups:
            tag = max(left, key=lambda each: (left[each] / whole[each], whole[each]))
            left[tag] -= 1
            slots.append(tag)
        return slots


class CurriculumConfig(Settings):
    """Environments with a setting `level` begin at level 0; each tag goes up when it is done well, and down when it is
    not."""

    levels: PositiveInt = 3
    """From 0 on."""
    raise_at: Annotated[float, Field(ge=0, le=1)] = 0.75
    """Mean reward of the last groups at which the next level begins."""
    lower_at: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Mean reward below which the level before is played again. 0: never."""
    window: PositiveInt = 8
    """Groups that are looked at."""


class TrainEnvManagerConfig(EnvManagerConfig):
    """Environments that make training data."""

    curriculum: CurriculumConfig | None = None
    """Unset: every tag is played as its settings say."""


class ValEnvManagerConfig(EnvManagerConfig):
    """Environments for validation: greedy play on the same levels every time."""

    @model_validator(mode="after")
    def _greedy(self) -> "ValEnvManagerConfig":
        if self.group_size != 1:
            raise ValueError(
                f"group_size: validation plays at temperature 0, where {self.group_size} members would play the "
                "same episode; only 1 is accepted"
            )
        if self.group_size_redundancy:
            raise ValueError("group_size_redundancy: validation plays every level; only 0 is accepted")
        if self.group_filter is not None:
            raise ValueError("group_filter: validation leaves no level out; only null is accepted")
        if self.filters:
            raise ValueError("filters: validation leaves no level out; only [] is accepted")
        return self


class CustomEnvConfig(Settings):
    """What one tag means in this run: a new tag, or other settings for a known one."""

    env_type: str | None = None
    """A known tag to build on, or a factory of one's own as `module:function`. Unset: the tag's own name."""
    env_config: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment."""
    max_steps: PositiveInt | None = None
    """Most actions in an episode. Unset: the environment's own limit."""
    max_tokens_per_step: PositiveInt | None = None
    """Most tokens in one answer. Unset: the environment's own limit."""
    agent_system_template: str | None = None
    """System prompt. Unset: the environment's own."""
    agent_opening_template: str | None = None
    """First user message. Unset: the environment's own."""
    agent_template: str | None = None
    """Every later user message. Unset: the environment's own."""
    step_timeout: PositiveFloat | None = None
    """Seconds that `reset` or `step` may take. Unset: `limits.step_timeout`."""
