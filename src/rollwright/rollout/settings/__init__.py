"""Settings of rollouts: environments, groups, curricula, limits and budgets."""

from typing import Annotated, Any

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from rollwright.registry import Registry
from rollwright.rewards.settings import RewardList
from rollwright.rollout.filters.settings import FILTERS, AnyFilterConfig
from rollwright.rollout.settings.agents import AgentChoice
from rollwright.sandbox.settings import BoxConfig
from rollwright.settings import Settings, choose_kinds

CURRICULA: Registry[Any] = Registry(
    "curricula",
    "curriculum",
    {"by_reward": "rollwright.rollout.curriculum:Curriculum"},
    protocol="rollwright.rollout.curriculum:LevelSampler",
    key="train_env_manager.curriculum.name",
)

TASK_SAMPLERS: Registry[Any] = Registry(
    "task_samplers",
    "task sampler",
    {"teaching": "rollwright.rollout.teaching:Teaching"},
    protocol="rollwright.rollout.draws:TaskSampler",
    key="train_env_manager.task_sampler.name",
)


class EnvManagerConfig(Settings):
    """Groups of environments. All members of a group have the same configuration and seed."""

    num_env_groups: PositiveInt
    """Concurrent groups."""
    group_size: PositiveInt = 1
    """Trajectories of a complete group."""
    tags: Annotated[list[str], Field(min_length=1)]
    """Environments to play."""
    num_groups_partition: list[PositiveInt] | None = None
    """Groups for each tag, in the order of `tags`. Unset: split evenly, the remainder going to the first tags."""
    max_env_num_per_worker: PositiveInt | None = None
    """Limit of environments of one worker. Unset: one worker runs them all."""
    group_size_redundancy: Annotated[int, Field(ge=0)] = 0
    """Extra members started in each group; the first `group_size` to finish count, the rest are cancelled."""
    min_group_size: PositiveInt | None = None
    """Smallest accepted group after members failed for good. Unset: `group_size`."""
    group_filter: str | None = None
    """Filter of complete groups: `zero_variance`, or a user-defined function as `module:function`."""
    filters: list[AnyFilterConfig] = Field(default_factory=list)
    """Filters of turns, trajectories and groups; a name alone stands for its default settings."""

    @field_validator("filters", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return choose_kinds(value, FILTERS, "test")

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
        """Number of groups for each tag."""
        if self.num_groups_partition is not None:
            return self.num_groups_partition
        share, rest = divmod(self.num_env_groups, len(self.tags))
        return [share + (place < rest) for place in range(len(self.tags))]

    @property
    def largest_group(self) -> int:
        """Most members of a complete group."""
        return self.group_size

    @property
    def num_envs(self) -> int:
        """Number of concurrent environments."""
        return self.num_env_groups * (self.largest_group + self.group_size_redundancy)

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
    """Environments with a setting `level` begin at level 0; the level of a tag rises at a high mean reward, and falls at a
    low one."""

    levels: PositiveInt = 3
    """Number of levels, from 0 on."""
    raise_at: Annotated[float, Field(ge=0, le=1)] = 0.75
    """Mean reward of the last groups at which the next level begins."""
    lower_at: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Mean reward below which the previous level is played again. 0: never."""
    window: PositiveInt = 8
    """Number of latest groups in the mean."""
    name: str = "by_reward"
    """`by_reward`, or a user-defined curriculum as `module:name`, which receives these settings too."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a user-defined curriculum."""


class TaskSamplerConfig(Settings):
    """Plays levels and task rows again while they teach: while some members of a group solve them and others do not. A name
    in place of the section chooses one with its default settings."""

    name: str = "teaching"
    """`teaching`, or a user-defined sampler as `module:name`, which receives these settings too."""
    low: Annotated[float, Field(ge=0.02, lt=1)] = 0.1
    """Estimated solve rate below which a level is not played again."""
    high: Annotated[float, Field(gt=0, le=0.98)] = 0.9
    """Estimated solve rate above which a level is not played again."""
    explore: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of groups that take the next level in order, whatever is known."""
    largest_group: PositiveInt | None = None
    """Most members of a group, which then has as many as make it likely to teach; on average no more tokens are sampled than
    by groups of `group_size`. Unset: all groups have `group_size` members."""
    smallest_group: Annotated[int, Field(ge=2)] = 2
    """Fewest members of a group, with `largest_group`."""
    informative: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Probability with which the members of a group should differ, with `largest_group`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a user-defined sampler."""

    @model_validator(mode="after")
    def _in_order(self) -> "TaskSamplerConfig":
        if self.low >= self.high:
            raise ValueError(f"low: {self.low:g} is not below high, which is {self.high:g}")
        return self


class TrainEnvManagerConfig(EnvManagerConfig):
    """Environments that generate training data."""

    curriculum: CurriculumConfig | None = None
    """Unset: every tag keeps its own level."""
    task_sampler: TaskSamplerConfig | None = None
    """How levels and task rows are chosen. Unset: in order, a file's rows in shuffled epochs."""

    @field_validator("task_sampler", mode="before")
    @classmethod
    def _sampler_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits_groups(self) -> "TrainEnvManagerConfig":
        sampler = self.task_sampler
        if sampler is not None and sampler.largest_group is not None:
            if sampler.largest_group < self.group_size:
                raise ValueError(
                    f"task_sampler.largest_group: {sampler.largest_group} is below group_size, which is {self.group_size}"
                )
            if sampler.smallest_group > self.group_size:
                raise ValueError(
                    f"task_sampler.smallest_group: {sampler.smallest_group} is above group_size, which is {self.group_size}"
                )
        return self

    @property
    def largest_group(self) -> int:
        sampler = self.task_sampler
        return (sampler.largest_group if sampler is not None else None) or self.group_size


class ValEnvManagerConfig(EnvManagerConfig):
    """Environments for validation: play on the same levels every time, greedy unless a temperature is given."""

    temperature: NonNegativeFloat = 0.0
    """Sampling temperature. 0: always the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the probability mass that is sampled from."""

    @model_validator(mode="after")
    def _fits_validation(self) -> "ValEnvManagerConfig":
        if self.group_size != 1 and self.temperature == 0:
            raise ValueError(
                f"group_size: validation plays at temperature 0, where {self.group_size} members would play the "
                "same episode; only 1 is accepted, or give a temperature"
            )
        if self.group_size_redundancy:
            raise ValueError("group_size_redundancy: validation plays every level; only 0 is accepted")
        if self.group_filter is not None:
            raise ValueError("group_filter: validation leaves no level out; only null is accepted")
        if self.filters:
            raise ValueError("filters: validation leaves no level out; only [] is accepted")
        return self


class CustomEnvConfig(Settings):
    """Definition of one tag in this run: a new tag, or other settings of a known one."""

    env_type: str | None = None
    """A known tag, or a user-defined factory as `module:function`. Unset: the tag itself."""
    env_config: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment."""
    max_steps: PositiveInt | None = None
    """Limit of actions in an episode. Unset: the environment's limit."""
    max_tokens_per_step: PositiveInt | None = None
    """Limit of tokens in one answer. Unset: the environment's limit."""
    agent_system_template: str | None = None
    """System prompt. Unset: the environment's own."""
    agent_opening_template: str | None = None
    """First user message. Unset: the environment's own."""
    agent_template: str | None = None
    """Every later user message. Unset: the environment's own."""
    step_timeout: PositiveFloat | None = None
    """Seconds that `reset` or `step` may take. Unset: `limits.step_timeout`."""
    tasks: str | None = None
    """Rows to play in place of an environment, one row per group: a file that ends in .jsonl, .csv or .parquet, the folder
    of a dataset, `hf:NAME[#SPLIT]`, or `module:function`. A path is relative to `folder`."""
    held_out: Annotated[float, Field(gt=0, lt=1)] | str | None = None
    """Rows for validation: a share of `tasks`, chosen by their content, or another file. Unset: none; a tag that is only
    validated plays all its rows."""
    template: str | None = None
    """How a row is asked, with its fields in braces: `{question}`. Unset: the first of the fields question, prompt,
    problem, instruction, input."""
    tasks_fingerprint: str | None = None
    """Checksum of the rows. A run fills it in when it begins; one that finds other rows is refused."""

    box: BoxConfig | None = None
    """The box of each attempt, for tools, rewards and agents. Unset: none."""
    agent: AgentChoice | None = None
    """Plays the rows of `tasks`, or an environment that gives it a box, such as `harbor:PATH`: a function of one's own as
    `module:function`, a command, `{cli: claude-code}`, `terminal`, `remote` programs, `oracle` or `nop`. Unset: the chat
    agent."""
    rewards: RewardList = ()
    """Rewards that judge an episode when it ends; their weighted sum is added to what the environment gave. A text alone is a
    kind, or `module:function`. Needed with `tasks`; with an `agent`, unset means the number that it returns."""
    success_at: float = 1.0
    """The episode counts as solved if the sum of its `rewards` is at least this, unless its environment says itself."""

    @field_validator("agent", mode="before")
    @classmethod
    def _choose_agent(cls, value: Any) -> Any:
        if value in ("remote", "terminal", "oracle", "nop"):
            return {"kind": value}
        if isinstance(value, str):
            return {"kind": "function", "function": value}
        if isinstance(value, dict) and "kind" not in value:
            named = next((kind for kind in ("command", "cli") if kind in value), "function")
            return {"kind": named, **value}
        return value

    @property
    def names_files(self) -> bool:
        """Whether it names files or modules of the user's own, which lie in `folder`."""
        return self.tasks is not None or self.agent is not None or bool(self.rewards)

    @model_validator(mode="after")
    def _has_tasks(self) -> "CustomEnvConfig":
        if self.tasks is None:
            for key in ("held_out", "template", "tasks_fingerprint"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key}: is a setting of `tasks`, which is not set")
        elif self.env_type is not None or self.env_config:
            raise ValueError(
                "tasks: are played in place of an environment; leave env_type and env_config out"
            )
        return self


class LimitsConfig(Settings):
    """Time limits and retries. A failure ends one attempt; the rollout is retried, and finally left out."""

    step_timeout: PositiveFloat = 60.0
    """Time limit in seconds of an environment's `reset` or `step`; then the environment is replaced."""
    generate_timeout: PositiveFloat = 600.0
    """Time limit in seconds of one generation, including its time in the engine's queue."""
    episode_timeout: PositiveFloat = 3600.0
    """Time limit in seconds of an episode."""
    lease_seconds: PositiveFloat = 30.0
    """Seconds without a heartbeat after which a worker loses its rollouts."""
    heartbeat_interval: PositiveFloat = 5.0
    """Seconds between a worker's heartbeats; must be shorter than the lease."""
    max_attempts: PositiveInt = 3
    """Attempts at one rollout before it counts as failed."""
    max_refills: PositiveInt = 64
    """Consecutive groups that may be filtered or stale while a batch is awaited, before the run stops."""

    @model_validator(mode="after")
    def _fits(self) -> "LimitsConfig":
        if self.heartbeat_interval >= self.lease_seconds:
            raise ValueError(
                f"heartbeat_interval: {self.heartbeat_interval:g} s is not shorter than lease_seconds, "
                f"which is {self.lease_seconds:g} s"
            )
        return self


class BudgetConfig(Settings):
    """Most that a run may spend. Once the next episode would not fit beside those in flight, no more are opened, those in
    flight end, and the run stops; with a larger budget it can be resumed."""

    usd: PositiveFloat | None = None
    """US dollars, by the table `prices`."""
    tokens: PositiveInt | None = None
    """Tokens of prompts and completions, those of judges included."""
    hours: PositiveFloat | None = None
    """Hours of playing, over all resumes."""

    @model_validator(mode="after")
    def _limits_something(self) -> "BudgetConfig":
        if self.usd is None and self.tokens is None and self.hours is None:
            raise ValueError("budget: is empty; accepted: usd, tokens, hours, or several of them")
        return self


class StreamSettings(Settings):
    """Settings of a run that determine its streams of groups."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "run"
    """Name of the run and of its folder."""
    seed: int = 42
    """Seed of all levels and all random draws."""
    max_steps: PositiveInt = 1
    """Batches to collect."""
    rollout_batch_size: PositiveInt | None = None
    """Trajectories in a batch, a multiple of `group_size`. Unset: one from every environment."""
    async_generation_ratio: NonNegativeFloat = 0.0
    """Batches that rollouts may be ahead of training. 0: synchronous. The age of any token that is handed over
    is at most this, rounded up, in policy versions."""
    limits: LimitsConfig = LimitsConfig()
    train_env_manager: TrainEnvManagerConfig | None = None

    @property
    def batch_size(self) -> int:
        """Trajectories in a training batch."""
        if self.rollout_batch_size is not None or self.train_env_manager is None:
            return self.rollout_batch_size or 0
        return self.train_env_manager.num_env_groups * self.train_env_manager.group_size
