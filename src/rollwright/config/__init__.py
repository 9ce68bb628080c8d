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

__all__ = [
    "AgentConfig",
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
    "TrainEnvManagerConfig",
    "ValEnvManagerConfig",
    "build",
    "dump",
    "load",
]
