"""From a configuration to how the episodes of each tag are played: environment, agent, strategy, sampling, limits."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

import rollwright.envs.registry as registry
from rollwright.agents import ChatAgent
from rollwright.config import (
    CustomEnvConfig,
    RunConfig,
)
from rollwright.engines.base import Policy, Sampling
from rollwright.envs.base import Env, PlaysEpisodes, PromptTemplates, can_fork, open_for_inspection
from rollwright.errors import ConfigError
from rollwright.rollout.branching import make_branching
from rollwright.rollout.curriculum import LevelSampler, level_tag, make_curriculum
from rollwright.rollout.episode import CHAIN, Episode, EpisodeSettings, Strategy
from rollwright.rollout.filters import build_filters
from rollwright.rollout.function import AgentFunction, AgentStrategy, SolutionStrategy
from rollwright.rollout.groups import LevelFunction
from rollwright.rollout.ranking import GroupRanker
from rollwright.rollout.scoring import NO_TASK
from rollwright.rollout.settings import LimitsConfig
from rollwright.rollout.settings.agents import RemoteAgentConfig
from rollwright.rollout.settings.strategies import StrategyConfig, TreeStrategyConfig
from rollwright.rollout.tree import BudgetUnit, ForkMode, TreeStrategy
from rollwright.run.build_agents import build_agent, build_board
from rollwright.run.build_rewards import TagRewards
from rollwright.run.build_tasks import TagTasks, level_function, open_tag_tasks
from rollwright.run.build_teams import build_teams
from rollwright.run.build_tools import ToolShelf
from rollwright.run.validations import VALIDATION
from rollwright.sandbox.settings import BoxConfig
from rollwright.tasks.env import TaskEnv
from rollwright.teams import Team
from rollwright.trajectory import MIN_TEMPERATURE

if TYPE_CHECKING:
    from rollwright.rollout.remote import RemoteBoard

TASK_TOKENS = 1024
"""Tokens of one answer to a task, where the tag does not say: room to reason, as for the questions of reasoning-gym."""

_A_YEAR = 365 * 24 * 3600.0
"""Seconds; no rollout waits so long."""


def build_strategy(config: StrategyConfig) -> Strategy:
    if not isinstance(config, TreeStrategyConfig):
        return CHAIN
    return TreeStrategy(
        make_branching(config.branch, config.width, config.depth),
        config.budget,
        BudgetUnit(config.unit),
        None if config.fork == "auto" else ForkMode(config.fork),
    )


def check_strategy(config: StrategyConfig, tag: str, make_env: Callable[[], Env]) -> None:
    """Whether training episodes of `tag` can be played so."""
    if not isinstance(config, TreeStrategyConfig) or config.fork != "fork":
        return
    with open_for_inspection(make_env) as env:
        copies_itself = can_fork(env)
    if not copies_itself:
        raise ConfigError(f"strategy.fork: `{tag}` cannot copy itself; accepted for it: auto, replay, root")


class SettingsTable:
    """How to play each tag of a run, in training and in validation. Wrong settings show when it is made."""

    def __init__(self, config: RunConfig, board: "RemoteBoard | None" = None) -> None:
        """`board`: of a worker in another process than the run; by default, the run's own."""
        self._settings: dict[tuple[str, str], EpisodeSettings] = {}
        self._tools = ToolShelf()
        self._run_seed = config.seed
        self._evaluates = config.evaluation is not None
        self._in_swarm = config.swarm is not None
        self._tasks = open_tag_tasks(config)
        self._rewards = TagRewards(config)
        self.board = board or build_board(config)
        """Offers rollouts to remote programs; `None`: no tag is played by such."""
        teams = build_teams(config, self._tools)
        for tag in config.tags:
            tasks = self._tasks.get(tag)
            train = _settings(config, tag) if tasks is None else _task_settings(config, tag, tasks)
            train = replace(train, rewards=self._rewards.get(tag))
            if config.train_env_manager is not None and tag in config.train_env_manager.tags:
                check_strategy(config.strategy, tag, partial(make_env, train))
            single: Strategy = CHAIN if isinstance(train.strategy, TreeStrategy) else train.strategy
            if (team := teams.get(tag)) is not None:
                _check_sampling(config, tag, team, train.sampling)
                train, single = replace(train, strategy=team), team.greedy()
            if (agent := build_agent(config, tag, self.board, partial(make_env, train))) is not None:
                train, single = _played_by(train, agent), agent
                if isinstance(config.custom_envs[tag].agent, RemoteAgentConfig):
                    train = replace(train, limits=_without_episode_limit(train.limits))
            validated = config.val_env_manager
            drawn = msgspec.structs.replace(
                train.sampling,
                temperature=0.0 if validated is None else validated.temperature,
                top_p=train.sampling.top_p
                if validated is None or not validated.temperature
                else validated.top_p,
            )
            stopping = () if config.train_env_manager is None else build_filters(config.train_env_manager)
            self._settings["train", tag] = replace(train, filters=stopping)
            val = replace(train, sampling=drawn, max_staleness=None, strategy=single)
            if tasks is not None:
                val = replace(val, env_factory=partial(tasks.make_env, VALIDATION))
            self._settings["val", tag] = val
        self._add_levels(config)
        self.sizes = self._count_levels(config) if self._evaluates else {}
        """Levels of tags whose environment has so many and no more; an evaluation plays each once before any again."""

    def _count_levels(self, config: RunConfig) -> dict[str, int]:
        found = {}
        for tag in config.tags:
            settings = self._settings["val", tag]
            if tag in self._tasks or settings.strategy is CHAIN:
                continue
            with open_for_inspection(partial(make_env, settings)) as env:
                if isinstance(count := getattr(env, "samples", None), int) and count > 0:
                    found[tag] = count
        return found

    def level_of(self, mode: str, slot_tags: Sequence[str]) -> LevelFunction:
        """The level of each group of a stream whose slots have these tags."""
        told = None if self._in_swarm else slot_tags
        return level_function(
            self._tasks, mode, self._run_seed, told, by_tag=self._evaluates, sizes=self.sizes
        )

    def ordered_level(self, tag: str, place: int) -> int:
        """The level of the n-th training group of the tag that takes its levels in order."""
        return level_function(self._tasks, "train", self._run_seed, [tag], by_tag=True)(tag, place)

    def swarm_level(self, tag: str, seed: int, index: int) -> int:
        """The level of a training group of the peer with this seed."""
        return level_function(self._tasks, "train", seed, None)(tag, index)

    def ranker(self) -> GroupRanker | None:
        """Ranks the groups of tags that have group judges; `None`: there are none."""
        ranked = self._rewards.ranked()
        return GroupRanker(ranked, self._task_of) if ranked else None

    def _task_of(self, tag: str, level: int) -> Mapping[str, Any]:
        tasks = self._tasks.get(tag)
        return NO_TASK if tasks is None else tasks.train.row(level)

    def _add_levels(self, config: RunConfig) -> None:
        for tag, level in _level_tags(config):
            played = self._settings["train", tag]
            env_config = {**played.env_config, "level": level}
            with open_for_inspection(partial(registry.make, played.env_type, env_config)):
                pass  # a level that does not exist shows here
            self._settings["train", level_tag(tag, level)] = replace(played, env_config=env_config)

    def training_tags(self) -> list[str]:
        """All that may be played in training, levels too."""
        return [tag for mode, tag in self._settings if mode == "train"]

    def answer_tokens(self, tag: str) -> int:
        """Most tokens of one answer in training episodes of the tag."""
        return self._settings["train", tag].sampling.max_tokens

    async def check(self) -> None:
        """Whether this machine can give what the agents and their tools need."""
        await self._tools.check()
        for each in self._settings.values():
            if isinstance(each.strategy, AgentStrategy):
                await each.strategy.prepare()

    def use_policy(self, policy: Policy) -> None:
        """Sets the run's policy, which judges where a reward asks a model and names no other."""
        self._rewards.use_policy(policy)

    async def close(self) -> None:
        """Ends what the agents' tools and the rewards hold."""
        await self._tools.close()
        await self._rewards.close()

    def __call__(self, episode: Episode) -> EpisodeSettings:
        try:
            return self._settings[episode.mode, episode.tag]
        except KeyError:
            known = ", ".join(sorted({tag for _, tag in self._settings})) or "no environments"
            raise ConfigError(f"tag `{episode.tag}` is not part of this run; it plays {known}") from None


def _played_by(settings: EpisodeSettings, agent: AgentStrategy | SolutionStrategy) -> EpisodeSettings:
    """The settings of a tag that an agent plays, with the rules and the box that the agent needs."""
    settings = replace(settings, strategy=agent)
    if isinstance(agent, AgentStrategy):
        rules = getattr(agent.function, "rules", None)
        settings = settings if rules is None else replace(settings, capture=rules(settings.capture))
        if agent.box_needs.gateway and settings.box is None and settings.env_factory is not None:
            settings = replace(settings, box=BoxConfig())
    return settings


def _without_episode_limit(limits: LimitsConfig) -> LimitsConfig:
    """For a rollout that waits until a program takes it; the agent itself limits the episode from then on."""
    return limits.model_copy(update={"episode_timeout": _A_YEAR})


def _check_sampling(config: RunConfig, tag: str, team: Team, sampling: Sampling) -> None:
    """An agent whose every token would be out of the loss is not trained by a run that says it is."""
    for name, agent in team.agents.items() if config.training is not None else ():
        why = agent.override(sampling).params().not_modelled
        if agent.trainable and why is not None:
            raise ConfigError(
                f"orchestras.{tag}.agents.{name}.sampling: what is {why} cannot be trained; accepted: a temperature of "
                f"{MIN_TEMPERATURE:g} or more and top_p 1, or trainable: false"
            )


def build_curriculum(config: RunConfig) -> LevelSampler | None:
    """Of the training stream, where there is one; nobody's level has changed yet."""
    manager = config.train_env_manager
    if manager is None or manager.curriculum is None:
        return None
    return make_curriculum(manager.curriculum, dict.fromkeys(tag for tag, _ in _level_tags(config)))


def _level_tags(config: RunConfig) -> Iterator[tuple[str, int]]:
    """The training tags that have levels, with each of these."""
    manager = config.train_env_manager
    if manager is None or manager.curriculum is None:
        return
    known = config.custom_envs
    leveled = [
        tag
        for tag in manager.tags
        if not (tag in known and known[tag].tasks is not None)
        and registry.accepts_setting((known[tag].env_type if tag in known else None) or tag, "level")
    ]
    if not leveled:
        raise ConfigError(
            f"train_env_manager.curriculum: none of {', '.join(manager.tags)} has levels; leave it out"
        )
    for tag in leveled:
        for level in range(manager.curriculum.levels):
            yield tag, level


def function_settings(config: RunConfig, function: AgentFunction) -> EpisodeSettings:
    """How a user's own function is played: the run's sampling and limits, without an environment."""
    name = getattr(function, "__name__", type(function).__name__)
    return EpisodeSettings(
        env_type=name,
        env_config={},
        agent=ChatAgent(PromptTemplates("", "", "")),
        sampling=Sampling(**dict(config.sampling)),
        max_steps=1,
        sequence_length=config.sequence_length,
        limits=config.limits,
        capture=config.gateway,
    )


def make_env(settings: EpisodeSettings) -> Env:
    if settings.env_factory is not None:
        return settings.env_factory()
    return registry.make(settings.env_type, settings.env_config)


def _settings(config: RunConfig, tag: str) -> EpisodeSettings:
    """How a tag with an environment is played in training."""
    custom = config.custom_envs.get(tag, CustomEnvConfig())
    env_type = custom.env_type or tag
    spec = registry.spec(env_type)
    env_config = {**spec.config, **custom.env_config}
    max_steps = custom.max_steps or env_config.get("max_steps", spec.max_steps)
    if registry.accepts_setting(env_type, "max_steps"):
        env_config["max_steps"] = max_steps
    with open_for_inspection(partial(registry.make, env_type, env_config)) as env:
        own = env.prompts
        plays_itself = isinstance(env, PlaysEpisodes)
    made = EnvParts(env_type, env_config, own, max_steps, spec.max_tokens_per_step, spec.step_timeout)
    settings = _episode_settings(config, tag, custom, made)
    return replace(settings, strategy=_whole_episodes(config, tag)) if plays_itself else settings


def _whole_episodes(config: RunConfig, tag: str) -> Strategy:
    """For an environment that plays by itself."""
    if tag in config.orchestras:
        raise ConfigError(f"orchestras.{tag}: its environment plays whole episodes by itself; leave it out")
    if isinstance(config.strategy, TreeStrategyConfig):
        raise ConfigError(
            f"strategy.kind: `{tag}` plays whole episodes by itself, along one path; got tree, accepted: chain"
        )
    from rollwright.rollout.whole_episode import WholeEpisodeStrategy

    return WholeEpisodeStrategy()


def _task_settings(config: RunConfig, tag: str, tasks: TagTasks) -> EpisodeSettings:
    """How a tag with tasks is played in training."""
    custom = config.custom_envs[tag]
    env = TaskEnv(tasks.train, tasks.template)
    # Not where they lie: two machines with the same rows play the same tasks.
    share = custom.held_out if isinstance(custom.held_out, float) else None  # a file is in the fingerprint
    told = {"fingerprint": tasks.fingerprint, "held_out": share, "template": tasks.template}
    made = EnvParts(tag, told, env.prompts, custom.max_steps or 1, TASK_TOKENS)
    settings = _episode_settings(config, tag, custom, made)
    return replace(settings, env_factory=partial(tasks.make_env, "train"))


class EnvParts(NamedTuple):
    """What an environment brings to the settings of its tag."""

    env_type: str
    env_config: dict[str, Any]
    prompts: PromptTemplates
    max_steps: int
    max_tokens_per_step: int
    step_timeout: float | None = None


def _episode_settings(
    config: RunConfig, tag: str, custom: CustomEnvConfig, made: EnvParts
) -> EpisodeSettings:
    own, max_steps = made.prompts, made.max_steps
    max_tokens = custom.max_tokens_per_step or made.max_tokens_per_step
    agent = ChatAgent(
        prompts=PromptTemplates(
            system=own.system if custom.agent_system_template is None else custom.agent_system_template,
            opening=own.opening if custom.agent_opening_template is None else custom.agent_opening_template,
            turn=own.turn if custom.agent_template is None else custom.agent_template,
        ),
        history=config.agent.history,
        max_steps=max_steps,
        max_response_length=max_tokens,
    )
    agent.check_templates(f"custom_envs.{tag}")
    limits = config.limits
    if (step_timeout := custom.step_timeout or made.step_timeout) is not None:
        limits = limits.model_copy(update={"step_timeout": step_timeout})
    return EpisodeSettings(
        env_type=made.env_type,
        env_config=made.env_config,
        agent=agent,
        sampling=Sampling(**dict(config.sampling), max_tokens=max_tokens),
        max_steps=max_steps,
        sequence_length=config.sequence_length,
        limits=limits,
        max_staleness=math.ceil(config.async_generation_ratio),
        strategy=build_strategy(config.strategy),
        box=custom.box,
        capture=config.gateway,
    )
