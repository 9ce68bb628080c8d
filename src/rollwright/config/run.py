"""The whole configuration of a run."""

from typing import Any

from pydantic import Field, PositiveInt, field_validator, model_validator

from rollwright.agents.settings import History
from rollwright.engines.settings import (
    POLICIES,
    PolicyConfig,
    PriceConfig,
    SamplingConfig,
    SimulatedPolicyConfig,
)
from rollwright.evaluation.settings import EvaluationConfig
from rollwright.gateway.settings import CaptureRules
from rollwright.models.settings import DownloadConfig, ModelPool, large_model_pool, small_model_pool
from rollwright.rollout.settings import BudgetConfig, CustomEnvConfig, StreamSettings, ValEnvManagerConfig
from rollwright.rollout.settings.agents import RemoteConfig
from rollwright.rollout.settings.strategies import ChainStrategyConfig, StrategyConfig
from rollwright.settings import Settings, choose_kind
from rollwright.swarm.settings import SwarmConfig
from rollwright.teams.settings import OrchestraConfig, Performance
from rollwright.training.settings import TrainingConfig


class AgentConfig(Settings):
    """How the agent builds prompts."""

    history: History = History()
    performance: Performance = Performance()


class RunConfig(StreamSettings):
    """One run: its policy, its environments, and the number of batches."""

    folder: str | None = None
    """Where the task files, and the modules of agents and rewards, of `custom_envs` are looked up. Unset: in the folder of
    the configuration file."""
    eval_steps: PositiveInt | None = None
    """Batches between validations. Unset: one validation at the end, if there is a `val_env_manager`."""
    profile_steps: PositiveInt = 100
    """Batches between profiles of the last rollouts; one is printed at the end in any case."""
    keep_steps: PositiveInt | None = None
    """Batches whose trajectories, rollouts, failures and figures are kept; there are up to twice as many before the
    older half is removed. Removed rollouts stay counted. Unset: nothing is removed. A run that trains has
    `training.keep_steps` instead."""
    sequence_length: PositiveInt = 8192
    """Longest token sequence, prompt and completion together."""
    max_inflight: PositiveInt | None = None
    """Most concurrent episodes. Unset: tuned while running, by the engine's throughput."""
    policy: PolicyConfig = SimulatedPolicyConfig()
    """The policy that plays."""
    default_large_model_pool: ModelPool = Field(default_factory=large_model_pool)
    """Models for `policy.model: auto` if one of them fits into the free memory."""
    default_small_model_pool: ModelPool = Field(default_factory=small_model_pool)
    """Models for `policy.model: auto` otherwise. Both pools take folders and fetched models."""
    downloads: DownloadConfig = DownloadConfig()
    policies: dict[str, PolicyConfig] = Field(default_factory=dict)
    """Further policies by name, for agents of teams that do not use the run's own."""
    sampling: SamplingConfig = SamplingConfig()
    agent: AgentConfig = AgentConfig()
    strategy: StrategyConfig = ChainStrategyConfig()
    """How training episodes are played."""
    orchestras: dict[str, OrchestraConfig] = Field(default_factory=dict)
    """Teams of agents, by the tag of the environment that each plays. A single agent plays other tags."""
    gateway: CaptureRules = CaptureRules()
    remote: RemoteConfig = RemoteConfig()
    training: TrainingConfig | None = None
    swarm: SwarmConfig | None = None
    val_env_manager: ValEnvManagerConfig | None = None
    evaluation: EvaluationConfig | None = None
    prices: dict[str, PriceConfig] = Field(default_factory=dict)
    """Prices by the name of the model (`policy.model`, or the policy's kind), in US dollars for a million tokens."""
    budget: BudgetConfig | None = None
    custom_envs: dict[str, CustomEnvConfig] = Field(default_factory=dict)
    """Settings by tag."""

    @field_validator("policy", mode="before")
    @classmethod
    def _default_kind(cls, value: Any) -> Any:
        value = {"kind": "simulated", **value} if isinstance(value, dict) else value
        return choose_kind(value, POLICIES, "policy")

    @field_validator("policies", mode="before")
    @classmethod
    def _kinds(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: choose_kind(each, POLICIES, "policy") for name, each in value.items()}

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
    def tags(self) -> list[str]:
        """Distinct tags of the run."""
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
        # The run's own policy plays every agent without a policy of its own, and every tag without a team.
        rest = (
            []
            if agents and len(named) == len(agents) and set(self.tags) <= set(self.orchestras)
            else [self.policy]
        )
        return any(isinstance(each, SimulatedPolicyConfig) for each in (*named, *rest))
