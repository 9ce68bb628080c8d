"""Settings as pydantic models; YAML and dotted overrides."""

from rollwright.config.env_managers import (
    CustomEnvConfig,
    EnvManagerConfig,
    TrainEnvManagerConfig,
    ValEnvManagerConfig,
)
from rollwright.config.loading import build, dump, load
from rollwright.config.policies import (
    OpenAIPolicyConfig,
    OraclePolicyConfig,
    PolicyConfig,
    RandomPolicyConfig,
    SimulatedPolicyConfig,
)
from rollwright.config.run import AgentConfig, HistoryConfig, LimitsConfig, RunConfig, SamplingConfig
from rollwright.config.swarm import CommunicationConfig, SwarmConfig
from rollwright.training.settings import AdvantageConfig, TrainingConfig

__all__ = [
    "AdvantageConfig",
    "AgentConfig",
    "CommunicationConfig",
    "CustomEnvConfig",
    "EnvManagerConfig",
    "HistoryConfig",
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
