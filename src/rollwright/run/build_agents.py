"""From a configuration to the agents that play the tasks of its tags."""

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollwright.agents.settings import AGENTS
from rollwright.config import RunConfig
from rollwright.envs.base import Env, Workplace, open_for_inspection
from rollwright.errors import ConfigError
from rollwright.rollout.function import AgentFunction, AgentStrategy, SolutionStrategy
from rollwright.rollout.settings.agents import (
    CLI_AGENTS,
    CliAgentConfig,
    CommandAgentConfig,
    FunctionAgentConfig,
    RemoteAgentConfig,
    SolutionAgentConfig,
    TerminalAgentConfig,
)
from rollwright.rollout.settings.strategies import ChainStrategyConfig

if TYPE_CHECKING:
    from rollwright.rollout.cli_agents.agent import CliAgent
    from rollwright.rollout.remote import RemoteBoard
    from rollwright.rollout.remote_workers import RunBoard

KEY_VARIABLE = "ROLLWRIGHT_GATEWAY_KEY"
"""Environment variable with the key that remote programs send."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def build_board(config: RunConfig) -> "RunBoard | None":
    """Where remote programs take their rollouts; `None`: no tag has such an agent."""
    if not has_remote_agents(config):
        return None
    from rollwright.rollout.remote_workers import RunBoard

    key = os.environ.get(KEY_VARIABLE)
    if key is None and config.remote.host not in LOOPBACK:
        raise ConfigError(
            f"remote.host: {config.remote.host!r} can be reached from other machines; set {KEY_VARIABLE}, or listen on "
            "127.0.0.1"
        )
    return RunBoard(key)


def has_remote_agents(config: RunConfig) -> bool:
    """Whether remote programs play a tag of the run."""
    own = (config.custom_envs.get(tag) for tag in config.tags)
    return any(each is not None and isinstance(each.agent, RemoteAgentConfig) for each in own)


def build_agent(
    config: RunConfig, tag: str, board: "RemoteBoard | None", make_env: Callable[[], Env]
) -> AgentStrategy | SolutionStrategy | None:
    """The agent of a tag; `None`: the chat agent, or a team, plays it."""
    custom = config.custom_envs.get(tag)
    if custom is None or custom.agent is None:
        return None
    where = f"custom_envs.{tag}.agent"
    if tag in config.orchestras:
        raise ConfigError(f"{where}: orchestras.{tag} plays the tag already; leave one of them out")
    if not isinstance(config.strategy, ChainStrategyConfig):
        raise ConfigError(
            f"strategy.kind: an agent plays along one path; got {config.strategy.kind}, accepted: chain"
        )
    folder, limits = Path(config.folder or ".").resolve(), config.limits
    in_box = custom.tasks is None
    if in_box:
        _check_workplace(where, tag, make_env)
    match custom.agent:
        case FunctionAgentConfig(function=path, process=process):
            try:
                if process:
                    return AgentStrategy(_own_process(path, limits.episode_timeout, folder))
                return AgentStrategy(_check_parameters(load_function(path)))
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
        case CommandAgentConfig() as agent if in_box:
            from rollwright.rollout.cli_agents.agent import BoxCommandAgent, BoxLimits

            box_limits = BoxLimits(agent.timeout, 1024 * agent.output_kb)
            return AgentStrategy(BoxCommandAgent(tuple(agent.command), box_limits, folder))
        case CommandAgentConfig() as agent:
            from rollwright.rollout.command import CommandAgent

            return AgentStrategy(CommandAgent.build(agent.command, agent.timeout, agent.output_kb, folder))
        case RemoteAgentConfig(lease_seconds=lease):
            from rollwright.rollout.remote import RemoteAgent

            assert board is not None, "made for a configuration with remote agents"
            return AgentStrategy(RemoteAgent(board, lease, limits.episode_timeout))
        case TerminalAgentConfig() as terminal:
            return AgentStrategy(_terminal_agent(terminal))
        case CliAgentConfig() as cli:
            return AgentStrategy(_cli_agent(cli, where))
        case SolutionAgentConfig(kind=kind):
            if not in_box:
                raise ConfigError(f"{where}: {kind} is for environments with boxes, such as harbor:PATH")
            return SolutionStrategy(kind == "oracle")


def _check_workplace(where: str, tag: str, make_env: Callable[[], Env]) -> None:
    """An agent needs rows of `tasks`, or an environment that gives it a box and judges what it has left there."""
    with open_for_inspection(make_env) as env:
        if not isinstance(env, Workplace):
            raise ConfigError(
                f"{where}: is a setting of `tasks`, and of environments that judge a box, such as harbor:PATH; "
                f"{tag} is neither"
            )


def _cli_agent(config: CliAgentConfig, where: str) -> "CliAgent":
    from rollwright.rollout.cli_agents.agent import BoxLimits, CliAgent
    from rollwright.rollout.cli_agents.recipe import CliRecipe

    try:
        recipe: Any = CLI_AGENTS.find(config.cli)
    except ConfigError as error:
        raise ConfigError(f"{where}.cli: {error}") from error
    if not isinstance(recipe, CliRecipe):
        raise ConfigError(f"{where}.cli: {config.cli!r} is a {type(recipe).__name__}, not a CliRecipe")
    return CliAgent(
        recipe,
        BoxLimits(config.timeout, 1024 * config.output_kb),
        config.arguments,
        config.environment,
        config.prompt,
        only_gateway=config.network == "gateway",
    )


def _own_process(path: str, timeout: float, folder: Path) -> AgentFunction:
    """The function as an agent in a process of its own. Its module is not imported here, because it may build its client
    from variables that only that process has."""
    from rollwright.rollout.function_process import ProcessAgent

    module, colon, name = path.partition(":")
    if not colon or not name or module == "__main__":
        raise ConfigError(
            f"{path!r} cannot be found by a process of its own; a module's function is accepted, as module:function"
        )
    if find_spec(module.partition(".")[0]) is None:
        raise ConfigError(f"{path!r}: no module named {module!r}")
    return ProcessAgent(path, timeout, folder)


def _terminal_agent(config: TerminalAgentConfig) -> AgentFunction:
    from rollwright.agents.terminal import TerminalAgent

    agent = TerminalAgent(config.max_turns, config.seconds, config.output_limit)
    return agent if config.system is None else replace(agent, system=config.system)


def load_function(path: str) -> AgentFunction:
    """A user's agent function by its path, `module:function`."""
    function: Any = AGENTS.find(path)
    if not callable(function):
        raise ConfigError(f"agent {path!r}: is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def _check_parameters(function: AgentFunction) -> AgentFunction:
    called: Callable[..., Any] = function
    try:
        inspect.signature(called).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"is called as (task, session), which it does not take: {error}") from error
    except ValueError:  # written in C, without a signature
        pass
    return function
