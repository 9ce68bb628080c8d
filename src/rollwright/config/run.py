"""The whole configuration of a run."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from rollwright.config.base import Settings
from rollwright.config.env_managers import CustomEnvConfig, TrainEnvManagerConfig, ValEnvManagerConfig
from rollwright.config.model_pools import DownloadConfig, ModelPool, large_model_pool, small_model_pool
from rollwright.config.orchestra import OrchestraConfig, PerformanceConfig
from rollwright.config.policies import PolicyConfig, SimulatedPolicyConfig
from rollwright.config.strategy import ChainStrategyConfig, StrategyConfig
from rollwright.config.swarm import SwarmConfig
from rollwright.config.training import TrainingConfig


class SamplingConfig(Settings):
    """How the policy samples during training rollouts; validation always plays at temperature 0."""

    temperature: NonNegativeFloat = 1.0
    """0: the likeliest token, always."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the probability that is sampled from, likeliest tokens first."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a completion."""


class HistoryConfig(Settings):
    """What of the episode so far the model sees. Anything but `whole` starts a new token sequence each turn."""

    mode: Literal["whole", "window", "actions", "current"] = "whole"
    """`whole`: everything. `window`: the last `length` turns. `actions`: of earlier turns only the actions and
    observations, without the reasoning around them. `current`: nothing but the state now, in the opening's words."""
    length: PositiveInt | None = None
    """Earlier turns that are kept; needed for `window`, optional for `actions`."""

    @model_validator(mode="after")
    def _fits(self) -> "HistoryConfig":
        if self.mode == "window" and self.length is None:
            raise ValueError("length: a window needs the number of earlier turns to keep")
        if self.mode in ("whole", "current") and self.length is not None:
            raise ValueError(f"length: history `{self.mode}` has none; use mode `window` to limit it")
        return self


class AgentConfig(Settings):
    """How the agent writes prompts."""

    history: HistoryConfig = HistoryConfig()
    performance: PerformanceConfig = PerformanceConfig()


class LimitsConfig(Settings):
    """Time limits and retries. A failure ends one attempt; the rollout is tried again, then left out."""

    step_timeout: PositiveFloat = 60.0
    """Seconds that an environment's `reset` or `step` may take before it is given up as hung and replaced."""
    generate_timeout: PositiveFloat = 600.0
    """Seconds that one generation may take, waiting in the engine's line included."""
    episode_timeout: PositiveFloat = 3600.0
    """Seconds that an episode may take."""
    lease_seconds: PositiveFloat = 30.0
    """A worker that is silent for so long loses its rollouts to another."""
    heartbeat_interval: PositiveFloat = 5.0
    """Seconds between a worker's heartbeats; must be shorter than the lease."""
    max_attempts: PositiveInt = 3
    """Tries at one rollout before it counts as failed."""
    max_refills: PositiveInt = 64
    """Groups that may be filtered or too old in a row, while a batch is waited for, before the run stops."""

    @model_validator(mode="after")
    def _fits(self) -> "LimitsConfig":
        if self.heartbeat_interval >= self.lease_seconds:
            raise ValueError(
                f"heartbeat_interval: {self.heartbeat_interval:g} s is not shorter than lease_seconds, "
                f"which is {self.lease_seconds:g} s"
            )
        return self


class GatewayConfig(Settings):
    """What agents may do whose calls are recorded by the gateway."""

    client_sampling: Literal["pinned", "honoured"] = "pinned"
    """What becomes of a temperature, top_p or other sampling setting that a client asks for. `pinned`: every call is
    sampled as `sampling` says, and wishes are counted. `honoured`: a call's own temperature and top_p count; tokens
    drawn at temperature 0 or with a top_p below 1 are then out of the loss."""
    allow_no_calls: bool = False
    """Whether a rollout whose agent made no call may end with a reward; else it is a failure."""


class RunConfig(Settings):
    """One run: which policy plays which environments, and how much."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "run"
    """Name of the run and of its folder."""
    seed: int = 42
    """Every level and every draw follows from it."""
    max_steps: PositiveInt = 1
    """Batches to collect."""
    rollout_batch_size: PositiveInt | None = None
    """Trajectories in a batch, a multiple of `group_size`. Unset: one from every environment."""
    async_generation_ratio: NonNegativeFloat = 0.0
    """Batches that rollouts may be ahead of training. 0: synchronous. The age of any token that is handed over
    is at most this, rounded up, in policy versions."""
    eval_steps: PositiveInt | None = None
    """Batches between validations. Unset: one validation at the end, where there is a `val_env_manager`."""
    profile_steps: PositiveInt = 100
    """Batches between prints of what the last rollouts waited for; one comes at the end in any case."""
    keep_steps: PositiveInt | None = None
    """Batches whose trajectories, rollouts, failures and figures are kept; there are up to twice as many before the
    older half is removed. What is removed stays counted. Unset: nothing is removed. A run that trains has
    `training.keep_steps` instead."""
    sequence_length: PositiveInt = 8192
    """Longest token sequence, prompt and completion together."""
    max_inflight: PositiveInt | None = None
    """Most episodes at the same time. Unset: found while running, from the engine's throughput."""
    policy: PolicyConfig = SimulatedPolicyConfig()
    """Who plays."""
    default_large_model_pool: ModelPool = Field(default_factory=large_model_pool)
    """What `policy.model: auto` picks from where one of them fits into the free memory."""
    default_small_model_pool: ModelPool = Field(default_factory=small_model_pool)
    """What it picks from elsewhere. Folders and fetched models can stand in both."""
    downloads: DownloadConfig = DownloadConfig()
    policies: dict[str, PolicyConfig] = Field(default_factory=dict)
    """Further policies by name, for agents of teams that do not play with the run's own."""
    sampling: SamplingConfig = SamplingConfig()
    agent: AgentConfig = AgentConfig()
    strategy: StrategyConfig = ChainStrategyConfig()
    """How training episodes are played."""
    orchestras: dict[str, OrchestraConfig] = Field(default_factory=dict)
    """Teams of agents, by the tag of the environment that each plays. Other tags are played by one agent."""
    limits: LimitsConfig = LimitsConfig()
    gateway: GatewayConfig = GatewayConfig()
    training: TrainingConfig | None = None
    swarm: SwarmConfig | None = None
    train_env_manager: TrainEnvManagerConfig | None = None
    val_env_manager: ValEnvManagerConfig | None = None
    custom_envs: dict[str, CustomEnvConfig] = Field(default_factory=dict)
    """Settings by tag."""

    @field_validator("policy", mode="before")
    @classmethod
    def _default_kind(cls, value: Any) -> Any:
        return {"kind": "simulated", **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _fits(self) -> "RunConfig":
        train = self.train_env_manager
        if (
            train is not None
            and self.rollout_batch_size is not None
            and self.rollout_batch_size % train.group_size
        ):
            raise ValueError(
                f"rollout_batch_size: {self.rollout_batch_size} is not a multiple of group_size, "
                f"which is {train.group_size}"
            )
        if self.keep_steps is not None and self.training is not None:
            raise ValueError(
                "keep_steps: is for runs that only play; a run that trains has training.keep_steps"
            )
        return self

    @property
    def batch_size(self) -> int:
        """Trajectories in a training batch."""
        if self.rollout_batch_size is not None or self.train_env_manager is None:
            return self.rollout_batch_size or 0
        return self.train_env_manager.num_env_groups * self.train_env_manager.group_size

    @property
    def tags(self) -> list[str]:
        """All tags that are played, each once."""
        managers = [each for each in (self.train_env_manager, self.val_env_manager) if each is not None]
        return list(dict.fromkeys(tag for manager in managers for tag in manager.tags))

    @property
    def plays_simulated(self) -> bool:
        """Whether the simulated engine plays, or answers for one agent of a team."""
        agents = [
            agent
            for tag in self.tags
            if tag in self.orchestras
            for agent in self.orchestras[tag].agents.values()
        ]
        named = [self.policies[each.policy] for each in agents if each.policy in self.policies]
        # the run's own policy plays every agent that names none, and most tags have one agent
        rest = (
            []
            if agents and len(named) == len(agents) and set(self.tags) <= set(self.orchestras)
            else [self.policy]
        )
        return any(isinstance(each, SimulatedPolicyConfig) for each in (*named, *rest))
