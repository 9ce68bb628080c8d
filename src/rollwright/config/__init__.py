"""Configuration of a run: pydantic models, YAML files and dotted overrides."""

from rollwright.config.loading import build, dump, load
from rollwright.config.run import AgentConfig, RunConfig
from rollwright.engines.settings import (
    OpenAIPolicyConfig,
    OraclePolicyConfig,
    PolicyConfig,
    RandomPolicyConfig,
    SamplingConfig,
    SimulatedPolicyConfig,
)
from rollwright.rollout.settings import (
    CustomEnvConfig,
    EnvManagerConfig,
    LimitsConfig,
    TrainEnvManagerConfig,
    ValEnvManagerConfig,
)
from rollwright.swarm.settings import CommunicationConfig, SwarmConfig
from rollwright.training.settings import AdvantageConfig, TrainingConfig

__all__ = [
    "AdvantageConfig",
    "AgentConfig",
    "CommunicationConfig",
    "CustomEnvConfig",
    "EnvManagerConfig",
    "LimitsConfig",
    "OpenAIPolicyConfig",
    "OraclePolicyConfig",
    "PolicyConfig",
    "RandomPolicyConfig",
    "RunConfig",
    "SamplingConfig",
    "SimulatedPolicyConfig",
    "SwarmConfig",
    "TrainEnvManagerConfig",
    "TrainingConfig",
    "ValEnvManagerConfig",
    "build",
    "dump",
    "load",
]
