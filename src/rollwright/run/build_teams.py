"""Builds teams and the policies of their agents from the configuration."""

from collections.abc import Mapping
from dataclasses import fields, replace
from inspect import iscoroutinefunction
from typing import Any

from rollwright.config import OpenAIPolicyConfig, PolicyConfig, RunConfig, SimulatedPolicyConfig
from rollwright.engines.base import Policy, takes_tools
from rollwright.engines.factory import build_policy, check_policy, kind_takes_tools
from rollwright.engines.settings import VllmPolicyConfig
from rollwright.errors import ConfigError
from rollwright.registry import import_object
from rollwright.rollout.settings.strategies import ChainStrategyConfig
from rollwright.run.build_tools import ToolShelf
from rollwright.run.model_choice import cache_room
from rollwright.simulation.engine import make_simulated
from rollwright.teams import (
    CriticLoop,
    Flow,
    Route,
    SimulatedTeam,
    Team,
    TeamAgent,
    TeamPolicies,
    When,
    critic_team,
    math_team,
    search_team,
    sort_into_stages,
)
from rollwright.teams.settings import (
    CriticTeamConfig,
    LoopTeamConfig,
    MathTeamConfig,
    OrchestraConfig,
    OwnTeamConfig,
    RouteTeamConfig,
    SearchTeamConfig,
    TeamAgentConfig,
)

SERVES_ADAPTERS = ("vllm", "openai")
"""Kinds of policies whose engines take an adapter's name in place of the model's."""


def build_teams(config: RunConfig, shelf: ToolShelf | None = None) -> dict[str, Team]:
    """Teams of a run by tag, with tools from the shelf; raises an error for wrong settings."""
    tools = shelf or ToolShelf()
    teams = {
        tag: build_team(each, config, f"orchestras.{tag}", tools) for tag, each in config.orchestras.items()
    }
    if teams and not isinstance(config.strategy, ChainStrategyConfig):
        raise ConfigError(
            f"strategy.kind: a team plays along one path; got {config.strategy.kind}, accepted: chain"
        )
    names: dict[str, str] = {}
    for tag, team in teams.items():
        if tag not in config.tags:
            raise ConfigError(f"orchestras.{tag}: no such tag is played; there are: {', '.join(config.tags)}")
        if (other := names.setdefault(team.name, tag)) != tag:
            raise ConfigError(
                f"orchestras.{tag}.name: {team.name!r} is the team of {other} already; give another"
            )
    return teams


def build_team(config: OrchestraConfig, run: RunConfig, where: str, shelf: ToolShelf) -> Team:
    shipped: Team | None = None
    match config:
        case MathTeamConfig():
            shipped = math_team(max_loops=config.max_loops)
        case SearchTeamConfig():
            shipped = search_team()
        case CriticTeamConfig():
            shipped = critic_team(max_loops=config.max_loops)
    if shipped is not None:
        for name in config.agents:
            if name not in shipped.agents:
                raise ConfigError(f"{where}.agents.{name}: unknown; there are: {', '.join(shipped.agents)}")
    known = {} if shipped is None else dict(shipped.agents)
    agents = {
        name: known.get(name) for name in [*known, *(each for each in config.agents if each not in known)]
    }
    built = {
        name: _agent(config.agents.get(name, TeamAgentConfig()), base, f"{where}.agents.{name}", shelf)
        for name, base in agents.items()
    }
    flow = shipped.flow if shipped is not None else _flow(config, built, where)
    return Team(config.name or config.kind, built, flow, run.agent.performance)


def _agent(config: TeamAgentConfig, base: TeamAgent | None, where: str, shelf: ToolShelf) -> TeamAgent:
    """The shipped agent with the given settings on top, or a new agent of the given settings."""
    known = {each.name for each in fields(TeamAgent)}
    given: dict[str, Any] = {name: value for name, value in config if name in known and value is not None}
    if config.tools is not None:
        given["toolbox"] = shelf.toolbox(config.tools, f"{where}.tools") if config.tools else None
    if base is None and "prompt" not in given:
        raise ConfigError(f"{where}.prompt: is needed and has no default")
    agent = TeamAgent(**{"system": "", **given}) if base is None else replace(base, **given)
    agent.check(where)
    return agent


def _flow(config: OrchestraConfig, agents: Mapping[str, TeamAgent], where: str) -> Flow:
    match config:
        case LoopTeamConfig():
            in_loop = {name: each for name, each in config.agents.items() if name != config.critic}
            _check_judge(config.critic, agents, f"{where}.critic")
            return CriticLoop(
                sort_into_stages({name: each.after for name, each in in_loop.items()}, f"{where}.agents"),
                config.acts,
                config.critic,
                config.max_loops,
                {name: When(each.from_step, each.first_round) for name, each in in_loop.items()},
            )
        case RouteTeamConfig():
            _check_judge(config.router, agents, f"{where}.router")
            return Route(config.router, config.approved, config.rejected)
        case OwnTeamConfig():
            return _own_flow(config.function, f"{where}.function")
        case _:
            raise AssertionError(f"{config.kind} comes with a flow")


def _own_flow(path: str, where: str) -> Flow:
    try:
        flow: Any = import_object(path)
    except (ConfigError, ImportError) as error:
        raise ConfigError(f"{where}: {path!r}: {error}; expected module:function") from error
    if not iscoroutinefunction(flow) and not iscoroutinefunction(type(flow).__call__):
        raise ConfigError(f"{where}: {path!r} is no async function")
    return flow  # type: ignore[no-any-return]


def _check_judge(name: str | None, agents: Mapping[str, TeamAgent], where: str) -> None:
    if name is None:
        return
    if name not in agents:
        raise ConfigError(f"{where}: has no agent {name!r}; there are: {', '.join(agents)}")
    if agents[name].verdict is None:
        raise ConfigError(f"{where}: {name!r} gives no verdict; set its `verdict`")


def check_policies(config: RunConfig, own: Policy | None = None) -> None:
    """Check the policies of a run's settings without building one; raises the first error.

    `own`: policy that replaces the configured one.
    """
    if own is None:
        check_policy(config.policy)
    for named_by_rule in _rule_policies(config).values():
        check_policy(named_by_rule)
    if not config.orchestras:
        return
    run_policy_takes_tools = takes_tools(own) if own is not None else kind_takes_tools(config.policy)
    for tag, team in build_teams(config).items():
        for name, member in team.agents.items():
            where = f"orchestras.{tag}.agents.{name}"
            named = _named_policy(config, tag, name)
            if named is not None:
                check_policy(named)
                if config.training is not None and member.trainable:
                    raise ConfigError(
                        f"{where}: plays with a policy that this run does not train; set trainable: false, or leave "
                        "policy and adapter unset"
                    )
            if member.specs and not (run_policy_takes_tools if named is None else kind_takes_tools(named)):
                raise ConfigError(
                    f"{where}.tools: this agent's policy takes no tools; "
                    "accepted: openai with `api: chat`, vllm, sglang, llama_cpp, torch, simulated"
                )


def build_run_policy(config: RunConfig, own: Policy | None = None) -> Policy:
    """Policy of a run: `own` or the configured one, and with teams also the separate policies of their agents."""
    check_policies(config, own)
    rules = _rule_policies(config)
    if not config.orchestras:
        single = own or build_policy(config.policy, cache_room(config))
        by_name = {name: build_policy(each) for name, each in rules.items()}
        return TeamPolicies(single, by_name=by_name) if rules else single
    teams = build_teams(config)
    by_agent: dict[str, Policy] = {}
    made: dict[tuple[str | None, str | None], Policy] = {}
    for tag, team in teams.items():
        for name, agent in config.orchestras[tag].agents.items():
            if (named := _named_policy(config, tag, name)) is not None:
                wanted = agent.policy, agent.adapter
                if wanted not in made:
                    made[wanted] = _build(named, teams)
                by_agent[team.agent_id(name)] = made[wanted]
    cached = config.agent.performance.enable_preprocessing_cache
    run_policy = own or _build(config.policy, teams, cache_room(config))
    by_name = {name: _build(each, teams) for name, each in rules.items()}
    if not (by_agent or by_name or cached):
        return run_policy
    return TeamPolicies(run_policy, by_agent, by_name=by_name, segment_cache=cached)


def _rule_policies(config: RunConfig) -> dict[str, PolicyConfig]:
    """The policies that rules of the gateway name, and those that play other seats of environments."""
    found = {
        rule.policy: _named(config, rule.policy, None, f"gateway.calls[{place}]")
        for place, rule in enumerate(config.gateway.calls)
        if rule.policy is not None
    }
    for tag in config.tags:
        custom = config.custom_envs.get(tag)
        opponent = None if custom is None else custom.env_config.get("opponent")
        if isinstance(opponent, Mapping) and isinstance(name := opponent.get("policy"), str):
            found[name] = _named(config, name, None, f"custom_envs.{tag}.env_config.opponent")
    return found


def _named_policy(config: RunConfig, tag: str, agent_name: str) -> PolicyConfig | None:
    """Separate policy of an agent; `None` if it uses the run's."""
    agent = config.orchestras[tag].agents.get(agent_name)
    if agent is None or (agent.policy is None and agent.adapter is None):
        return None
    return _named(config, agent.policy, agent.adapter, f"orchestras.{tag}.agents.{agent_name}")


def _named(config: RunConfig, name: str | None, adapter: str | None, where: str) -> PolicyConfig:
    if name is not None and name not in config.policies:
        known = ", ".join(config.policies) or "none"
        raise ConfigError(f"{where}.policy: no {name!r} in `policies`; there are: {known}")
    found = config.policy if name is None else config.policies[name]
    if adapter is None:
        return found
    if not isinstance(found, VllmPolicyConfig | OpenAIPolicyConfig):
        raise ConfigError(
            f"{where}.adapter: policy kind {found.kind} serves no adapters; accepted: {', '.join(SERVES_ADAPTERS)}"
        )
    return found.model_copy(update={"model": adapter})


def _build(config: PolicyConfig, teams: Mapping[str, Team], cache_bytes: int | None = None) -> Policy:
    """Build a policy; a simulated engine answers each agent in the agent's own format."""
    if isinstance(config, SimulatedPolicyConfig):
        return make_simulated(config, SimulatedTeam.of(*teams.values(), skill=config.skill, approval=None))
    return build_policy(config, cache_bytes)
