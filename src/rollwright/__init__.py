"""rollwright: agentic-RL rollouts, from a laptop to a cluster to a swarm.

    import rollwright as rw

The names below are the public API. Each is imported with its own module when it is first used, so `import rollwright`
loads nothing else; the names are stable, the modules behind them are not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollwright.agents.session import Session as Session
    from rollwright.api import Evaluation as Evaluation
    from rollwright.api import TagScore as TagScore
    from rollwright.api import TrainingResult as TrainingResult
    from rollwright.api import evaluate as evaluate
    from rollwright.api import load_config as load_config
    from rollwright.api import train as train
    from rollwright.config.run import RunConfig as Config
    from rollwright.engines.base import EngineError as EngineError
    from rollwright.engines.base import Generation as Generation
    from rollwright.engines.base import Parsed as Parsed
    from rollwright.engines.base import Policy as Policy
    from rollwright.engines.base import Prompt as Prompt
    from rollwright.engines.base import Sampling as Sampling
    from rollwright.engines.base import ToolSpec as ToolSpec
    from rollwright.engines.base import UpdateMode as UpdateMode
    from rollwright.engines.base import Weights as Weights
    from rollwright.engines.rendering.bytes import BytesRenderer as BytesRenderer
    from rollwright.engines.settings import TorchServingConfig as TorchServingConfig
    from rollwright.engines.torch.policy import TorchPolicy as TorchPolicy
    from rollwright.envs.base import Env as Env
    from rollwright.envs.base import EnvironmentFailure as EnvironmentFailure
    from rollwright.envs.base import Info as Info
    from rollwright.envs.base import PromptTemplates as PromptTemplates
    from rollwright.envs.base import Reset as Reset
    from rollwright.envs.base import Step as Step
    from rollwright.envs.registry import EnvSpec as EnvSpec
    from rollwright.envs.registry import register as register_env
    from rollwright.errors import ConfigError as ConfigError
    from rollwright.errors import RollwrightError as RollwrightError
    from rollwright.remote import RemoteRollout as RemoteRollout
    from rollwright.remote import RemoteRun as RemoteRun
    from rollwright.rewards.composition import Rewards as Rewards
    from rollwright.rewards.functions import reward as reward
    from rollwright.rollout.function import AgentFunction as Agent
    from rollwright.rollout.scheduler import Batch as Batch
    from rollwright.rollout.worker import WorkerSettings as WorkerSettings
    from rollwright.run.folder import RunFolder as RunFolder
    from rollwright.run.folder import RunReader as RunReader
    from rollwright.run.run import Run as Run
    from rollwright.run.worker_process import run_worker as run_worker
    from rollwright.simulation.engine import SimulatedEngine as SimulatedEngine
    from rollwright.simulation.players import OraclePlayer as OraclePlayer
    from rollwright.simulation.players import RandomPlayer as RandomPlayer
    from rollwright.simulation.server_process import simulated_server as simulated_server
    from rollwright.store.api import Store as Store
    from rollwright.store.http.client import HttpStore as HttpStore
    from rollwright.store.http.server import StoreServer as StoreServer
    from rollwright.store.memory.store import MemoryStore as MemoryStore
    from rollwright.store.opening import open_store as open_store
    from rollwright.store.records import AttemptedRollout as AttemptedRollout
    from rollwright.store.records import EnqueueRequest as EnqueueRequest
    from rollwright.store.records import RolloutConfig as RolloutConfig
    from rollwright.tasks.index import Row as Task
    from rollwright.tools.context import ToolContext as ToolContext
    from rollwright.tools.pool import Pool as Pool
    from rollwright.tools.tool import tool as tool
    from rollwright.tools.toolbox import Toolbox as Toolbox
    from rollwright.training.advantages import make_advantage as make_advantage
    from rollwright.training.rows import build_rows as build_rows
    from rollwright.trajectory.arrays import floats as floats
    from rollwright.trajectory.arrays import token_ids as token_ids
    from rollwright.trajectory.forest import Message as Message
    from rollwright.trajectory.forest import Trajectory as Trajectory
    from rollwright.trajectory.samples import samples as samples
    from rollwright.trajectory.turn import FinishReason as FinishReason
    from rollwright.trajectory.turn import Outcome as Outcome
    from rollwright.trajectory.turn import StopReason as StopReason
    from rollwright.trajectory.turn import ToolCall as ToolCall
    from rollwright.trajectory.turn import Turn as Turn
    from rollwright.trajectory.turn import VersionRun as VersionRun

__version__ = "0.2.0"

_PLACES = {
    # runs
    "Run": "rollwright.run.run",
    "Config": "rollwright.config.run:RunConfig",
    "load_config": "rollwright.api",
    "train": "rollwright.api",
    "TrainingResult": "rollwright.api",
    "evaluate": "rollwright.api",
    "Evaluation": "rollwright.api",
    "TagScore": "rollwright.api",
    "Batch": "rollwright.rollout.scheduler",
    "RunFolder": "rollwright.run.folder",
    "RunReader": "rollwright.run.folder",
    "run_worker": "rollwright.run.worker_process",
    "WorkerSettings": "rollwright.rollout.worker",
    # environments and tasks
    "Env": "rollwright.envs.base",
    "EnvironmentFailure": "rollwright.envs.base",
    "EnvSpec": "rollwright.envs.registry",
    "Info": "rollwright.envs.base",
    "PromptTemplates": "rollwright.envs.base",
    "Reset": "rollwright.envs.base",
    "Step": "rollwright.envs.base",
    "register_env": "rollwright.envs.registry:register",
    "Task": "rollwright.tasks.index:Row",
    # agents, tools and rewards
    "Agent": "rollwright.rollout.function:AgentFunction",
    "Session": "rollwright.agents.session",
    "Pool": "rollwright.tools.pool",
    "ToolContext": "rollwright.tools.context",
    "Toolbox": "rollwright.tools.toolbox",
    "tool": "rollwright.tools.tool",
    "RemoteRollout": "rollwright.remote",
    "RemoteRun": "rollwright.remote",
    "Rewards": "rollwright.rewards.composition",
    "reward": "rollwright.rewards.functions",
    # policies
    "BytesRenderer": "rollwright.engines.rendering.bytes",
    "EngineError": "rollwright.engines.base",
    "Generation": "rollwright.engines.base",
    "OraclePlayer": "rollwright.simulation.players",
    "Parsed": "rollwright.engines.base",
    "Policy": "rollwright.engines.base",
    "Prompt": "rollwright.engines.base",
    "RandomPlayer": "rollwright.simulation.players",
    "Sampling": "rollwright.engines.base",
    "SimulatedEngine": "rollwright.simulation.engine",
    "ToolSpec": "rollwright.engines.base",
    "TorchPolicy": "rollwright.engines.torch.policy",
    "TorchServingConfig": "rollwright.engines.settings",
    "UpdateMode": "rollwright.engines.base",
    "Weights": "rollwright.engines.base",
    "simulated_server": "rollwright.simulation.server_process",
    # trajectories and training
    "FinishReason": "rollwright.trajectory.turn",
    "Message": "rollwright.trajectory.forest",
    "Outcome": "rollwright.trajectory.turn",
    "StopReason": "rollwright.trajectory.turn",
    "ToolCall": "rollwright.trajectory.turn",
    "Trajectory": "rollwright.trajectory.forest",
    "Turn": "rollwright.trajectory.turn",
    "VersionRun": "rollwright.trajectory.turn",
    "build_rows": "rollwright.training.rows",
    "floats": "rollwright.trajectory.arrays",
    "make_advantage": "rollwright.training.advantages",
    "samples": "rollwright.trajectory.samples",
    "token_ids": "rollwright.trajectory.arrays",
    # stores
    "AttemptedRollout": "rollwright.store.records",
    "EnqueueRequest": "rollwright.store.records",
    "HttpStore": "rollwright.store.http.client",
    "MemoryStore": "rollwright.store.memory.store",
    "RolloutConfig": "rollwright.store.records",
    "Store": "rollwright.store.api",
    "StoreServer": "rollwright.store.http.server",
    "open_store": "rollwright.store.opening",
    # errors
    "ConfigError": "rollwright.errors",
    "RollwrightError": "rollwright.errors",
}
"""The module of each public name; behind a colon, its name there."""

__all__ = [
    "Agent",
    "AttemptedRollout",
    "Batch",
    "BytesRenderer",
    "Config",
    "ConfigError",
    "EngineError",
    "EnqueueRequest",
    "Env",
    "EnvSpec",
    "EnvironmentFailure",
    "Evaluation",
    "FinishReason",
    "Generation",
    "HttpStore",
    "Info",
    "MemoryStore",
    "Message",
    "OraclePlayer",
    "Outcome",
    "Parsed",
    "Policy",
    "Pool",
    "Prompt",
    "PromptTemplates",
    "RandomPlayer",
    "RemoteRollout",
    "RemoteRun",
    "Reset",
    "Rewards",
    "RolloutConfig",
    "RollwrightError",
    "Run",
    "RunFolder",
    "RunReader",
    "Sampling",
    "Session",
    "SimulatedEngine",
    "Step",
    "StopReason",
    "Store",
    "StoreServer",
    "TagScore",
    "Task",
    "ToolCall",
    "ToolContext",
    "ToolSpec",
    "Toolbox",
    "TorchPolicy",
    "TorchServingConfig",
    "TrainingResult",
    "Trajectory",
    "Turn",
    "UpdateMode",
    "VersionRun",
    "Weights",
    "WorkerSettings",
    "__version__",
    "build_rows",
    "evaluate",
    "floats",
    "load_config",
    "make_advantage",
    "open_store",
    "register_env",
    "reward",
    "run_worker",
    "samples",
    "simulated_server",
    "token_ids",
    "tool",
    "train",
]


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'rollwright' has no attribute {name!r}")
    module, _, attribute = place.partition(":")
    value = globals()[name] = getattr(import_module(module), attribute or name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
