"""From a configuration to the agents that play the tasks of its tags."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollwright.agents.settings import AGENTS
from rollwright.config import RunConfig
from rollwright.errors import ConfigError
from rollwright.rollout.function import AgentFunction, AgentStrategy
from rollwright.rollout.settings import ChainStrategyConfig, FunctionAgentConfig, TerminalAgentConfig


def build_agent(config: RunConfig, tag: str) -> AgentStrategy | None:
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
    if isinstance(custom.agent, FunctionAgentConfig):
        try:
            return AgentStrategy(_check_parameters(load_function(custom.agent.function)))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    agent = custom.agent
    if isinstance(agent, TerminalAgentConfig):
        return AgentStrategy(_terminal_agent(agent))
    from rollwright.rollout.command import CommandAgent

    folder = Path(config.folder or ".").resolve()
    return AgentStrategy(CommandAgent.build(agent.command, agent.timeout, agent.output_kb, folder))


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
