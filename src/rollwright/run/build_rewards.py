"""From a configuration to the rewards of its tags, and to the policies that judge.

Always true: wrong settings show when the rewards are built, and nothing is asked, loaded or started before the first
episode is judged. A judge's calls are no part of any trajectory.
"""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING

from rollwright.config import RunConfig, build
from rollwright.engines.base import Generation, Policy, Prompt, Renderer, Sampling
from rollwright.engines.factory import build_policy, check_policy
from rollwright.engines.settings import PolicyConfig
from rollwright.errors import ConfigError
from rollwright.rewards.settings import (
    REWARDS,
    AnyReward,
    FunctionReward,
    GroupJudgeReward,
    JudgeSettings,
    ReturnedReward,
    RewardSettings,
)
from rollwright.rollout.scoring import EpisodeRewards
from rollwright.rollout.settings import CustomEnvConfig
from rollwright.rollout.settings.strategies import ChainStrategyConfig

if TYPE_CHECKING:
    from rollwright.rewards import Rewards


class JudgePolicy:
    """The policy of a judge: made from its settings at the first call, or else the run's own, which is set later."""

    def __init__(self, settings: PolicyConfig | None, where: str) -> None:
        self._settings = settings
        self._where = where
        self._own: Policy | None = None
        self.run_policy: Policy | None = None
        """Judges where the settings name no other policy."""

    @property
    def _policy(self) -> Policy:
        if self._settings is None:
            if self.run_policy is None:
                raise ConfigError(
                    f"{self._where}: there is no policy to judge with; give it one under `policy`"
                )
            return self.run_policy
        if self._own is None:
            self._own = build_policy(self._settings)
        return self._own

    @property
    def renderer(self) -> Renderer | None:
        return self._policy.renderer

    @property
    def version(self) -> int:
        return self._policy.version

    @property
    def pressure(self) -> int:
        return self._policy.pressure

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        return await self._policy.generate(prompt, sampling)

    async def close(self) -> None:
        """Closes the judge's own policy; the run closes the run's."""
        if self._own is not None:
            await self._own.close()


class TagRewards:
    """The rewards of all tags of a run."""

    def __init__(self, config: RunConfig) -> None:
        self._by_tag: dict[str, EpisodeRewards] = {}
        self._judges: list[JudgePolicy] = []
        for tag in config.tags:
            if (built := self._build(config, tag)) is not None:
                custom = config.custom_envs[tag]
                version = "" if config.swarm is None else rewards_version(custom)
                self._by_tag[tag] = EpisodeRewards(built, custom.success_at, version)

    def get(self, tag: str) -> EpisodeRewards | None:
        return self._by_tag.get(tag)

    def ranked(self) -> dict[str, EpisodeRewards]:
        """The rewards of the tags that have group judges."""
        return {tag: each for tag, each in self._by_tag.items() if each.rewards.group_names}

    def use_policy(self, policy: Policy) -> None:
        """Sets the run's policy, for judges that have none of their own."""
        for each in self._judges:
            each.run_policy = policy

    async def close(self) -> None:
        for rewards in self._by_tag.values():
            await rewards.rewards.close()
        for judge in self._judges:
            await judge.close()

    def _build(self, config: RunConfig, tag: str) -> "Rewards | None":
        custom = config.custom_envs.get(tag)
        if custom is None:
            return None
        wanted = rewards_of(custom)
        where = f"custom_envs.{tag}.rewards"
        if not wanted:
            if custom.tasks is None:
                return None
            raise ConfigError(
                f"{where}: is needed, because a row has no reward of its own; for example [exact_match]"
            )
        _check(wanted, where, has_agent=custom.agent is not None)
        _check_group_judges(config, tag, wanted, where)
        from rollwright.rewards import Rewards  # imported here: most runs have none

        try:
            return Rewards.build(wanted, lambda settings: self._judge(settings, where))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    def _judge(self, settings: JudgeSettings, where: str) -> Policy:
        named = None
        if settings.policy is not None:
            named = build({"policy": settings.policy}, source=where).policy
            check_policy(named)
        judge = JudgePolicy(named, where)
        self._judges.append(judge)
        return judge


def rewards_of(custom: CustomEnvConfig) -> Sequence[AnyReward]:
    """The rewards of a tag's settings: of tasks with an agent and without a list, the number that the agent returns."""
    if not custom.rewards and custom.agent is not None and custom.tasks is not None:
        return [ReturnedReward(kind="returned")]
    return custom.rewards


def rewards_version(custom: CustomEnvConfig) -> str:
    """A digest of the rewards' settings and of the modules of user-defined ones."""
    checksum = blake2b(digest_size=8)
    for each in rewards_of(custom):
        checksum.update(each.model_dump_json().encode())
        if isinstance(each, FunctionReward):
            found = REWARDS.find(each.function)
            module = inspect.getmodule(found)
            with suppress(OSError, TypeError):  # without a source, the settings alone tell rewards apart
                checksum.update(inspect.getsource(module or found).encode())
    return checksum.hexdigest()


def _check_group_judges(config: RunConfig, tag: str, rewards: Sequence[RewardSettings], where: str) -> None:
    manager = config.train_env_manager
    if manager is None or tag not in manager.tags:
        return
    if not any(isinstance(each, GroupJudgeReward) for each in rewards):
        return
    if manager.group_size < 2:
        raise ConfigError(
            f"{where}: group_judge ranks the members of a group; train_env_manager.group_size is {manager.group_size}, at "
            "least 2 are needed"
        )
    if not isinstance(config.strategy, ChainStrategyConfig):
        raise ConfigError(
            f"{where}: group_judge ranks episodes with one answer each; got strategy.kind {config.strategy.kind}, accepted: "
            "chain"
        )


def _check(rewards: Sequence[RewardSettings], where: str, *, has_agent: bool) -> None:
    if not has_agent and any(isinstance(each, ReturnedReward) for each in rewards):
        raise ConfigError(
            f"{where}: returned is what an agent's own function returned; the tag has no `agent`"
        )
