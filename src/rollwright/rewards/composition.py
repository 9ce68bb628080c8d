"""A list of rewards as one: the weighted sum of their values, with each value kept as a component.

Always true: all rewards of a list are evaluated concurrently, each within its time limit. Components are in the order of
the list, those of a mapping sorted by key. The total is the sum of weight times value over all components; every value is a
finite number. A reward that raises, hangs or returns something else is a `RewardFailure`, never a 0; of several, the first
in the list is raised, whichever failed first. The others are awaited, so that the verdicts of judges are cached for the
next attempt.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec

from rollwright.aio import is_cancellation
from rollwright.engines.base import Policy
from rollwright.errors import ConfigError, FormatError
from rollwright.rewards.failure import NoReward, RewardFailure, describe
from rollwright.rewards.functions import (
    FunctionComponent,
    RewardOptions,
    function_name,
    options_of,
)
from rollwright.rewards.group_judge import GroupJudge
from rollwright.rewards.judge import RubricJudge
from rollwright.rewards.scored import ScoredAttempt, TaskRow
from rollwright.rewards.settings import (
    NAME,
    REWARDS,
    FunctionReward,
    GroupJudgeReward,
    JudgeReward,
    JudgeSettings,
    RewardSettings,
    ShippedReward,
    default_name,
    parse_rewards,
)
from rollwright.trajectory import Trajectory, reward_of
from rollwright.trajectory.usage import calling_as

RewardGiven = RewardSettings | Mapping[str, Any] | str | Callable[..., Any]
"""An item of a list of rewards: settings, a mapping of them, a kind or `module:name`, or a function."""

PolicyChoice = Callable[[JudgeSettings], Policy]
"""Returns the policy of a judge."""


class RewardComponent(Protocol):
    """Computes one reward of one attempt; a plain or async function will do as well."""

    async def evaluate(self, attempt: ScoredAttempt) -> Any:
        """Returns a number or a mapping of named numbers; anything else is a failure."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class WeightedReward:
    """One reward of a list."""

    name: str
    weight: float
    component: "RewardComponent | GroupJudge"
    time_limit: float | None
    """Seconds for one evaluation. `None`: the component limits its own calls, without the time in its queue."""


@dataclass(frozen=True)
class RewardResult:
    """Total and components of one attempt."""

    total: float
    components: dict[str, float] = field(default_factory=dict)
    """Values before their weights, by name."""

    def store_in(self, trajectory: Trajectory) -> Trajectory:
        """A copy of the trajectory with this total as its episode reward, and these components."""
        return msgspec.structs.replace(
            trajectory, episode_reward=self.total, components=dict(self.components)
        )


class Rewards:
    """Evaluates a list of rewards. Belongs to one event loop; `close` releases processes and cancels calls."""

    def __init__(self, rewards: Sequence[WeightedReward]) -> None:
        names = [each.name for each in rewards]
        for name in names:
            if not NAME.fullmatch(name):
                raise ConfigError(f"reward {name!r}: a name has letters, digits, `_` and `-` only")
            if names.count(name) > 1:
                raise ConfigError(f"rewards: two have the name {name!r}; give each a `name` of its own")
        self.rewards = tuple(rewards)

    @classmethod
    def build(
        cls, given: Iterable[RewardGiven] | RewardGiven, policy: PolicyChoice | None = None
    ) -> "Rewards":
        """Builds rewards from settings and functions; a `ConfigError` says what is wrong. `policy`: chooses a judge's policy."""
        if isinstance(given, str | Mapping | RewardSettings) or callable(given):
            given = [given]
        return cls([_build_one(each, policy) for each in given])

    async def evaluate(self, task: TaskRow, trajectory: Trajectory, leaf: int | None = None) -> RewardResult:
        """Evaluates one attempt, without group judges. `leaf`: the branch of a tree."""
        alone = [each for each in self.rewards if not isinstance(each.component, GroupJudge)]
        attempt = ScoredAttempt(task, trajectory, leaf)
        return _combine(alone, await _settle([_evaluate_one(each, attempt) for each in alone]))

    async def evaluate_group(self, task: TaskRow, trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        """Evaluates all members of a group, in their order, with group judges."""
        members = [ScoredAttempt(task, each) for each in trajectories]
        columns = await _settle([_evaluate_column(each, task, members) for each in self.rewards])
        return [_combine(self.rewards, [column[at] for column in columns]) for at in range(len(members))]

    async def rank_group(self, task: TaskRow, trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        """Evaluates the group judges alone, for all members of a group, in their order."""
        judges = [each for each in self.rewards if isinstance(each.component, GroupJudge)]
        members = [ScoredAttempt(task, each) for each in trajectories]
        columns = await _settle([_evaluate_column(each, task, members) for each in judges])
        return [_combine(judges, [column[at] for column in columns]) for at in range(len(members))]

    @property
    def group_names(self) -> frozenset[str]:
        """Names of the group judges."""
        return frozenset(each.name for each in self.rewards if isinstance(each.component, GroupJudge))

    async def close(self) -> None:
        for each in self.rewards:
            await each.component.close()


def _build_one(given: RewardGiven, policy: PolicyChoice | None) -> WeightedReward:
    if callable(given) and not isinstance(given, RewardSettings):
        return _build_function(given, options_of(given), function_name(given))
    settings = given if isinstance(given, RewardSettings) else parse_rewards([given])[0]
    if isinstance(settings, FunctionReward):
        return _build_own(settings)
    assert isinstance(settings, ShippedReward)
    name = default_name(settings)
    if isinstance(settings, JudgeSettings):
        return WeightedReward(name, settings.weight, _build_judge(name, settings, policy), None)
    component = REWARDS.find(getattr(settings, "kind", ""))(name, settings)
    return WeightedReward(name, settings.weight, component, settings.time_limit)


def _build_own(settings: FunctionReward) -> WeightedReward:
    """A user-defined reward. Settings take precedence over the decorator's options."""
    path = settings.function
    found: Any = REWARDS.find(path)
    marked = options_of(found)
    options = RewardOptions(
        settings.name or marked.name,
        marked.weight if settings.weight is None else settings.weight,
        settings.time_limit or marked.time_limit,
    )
    name = options.name or default_name(settings)
    if isinstance(found, type):
        found = REWARDS.make(path, **settings.options)
    elif settings.options:
        found = partial(found, **settings.options)
    if not hasattr(found, "evaluate"):
        return _build_function(found, options, name, concurrency=settings.concurrency)
    if not callable(getattr(found, "close", None)):
        raise ConfigError(f"reward {path}: has `evaluate` but no method `close`; both are needed")
    return _weigh(name, options, found)


def _build_function(
    function: Callable[..., Any], options: RewardOptions, name: str, *, concurrency: int = 16
) -> WeightedReward:
    return _weigh(name, options, FunctionComponent(name, function, concurrency=concurrency))


def _weigh(name: str, options: RewardOptions, component: RewardComponent) -> WeightedReward:
    try:
        weight = reward_of(options.weight, "its weight")
        limit = reward_of(options.time_limit, "its time_limit")
    except FormatError as error:
        raise ConfigError(f"reward {name}: {error}") from error
    if limit <= 0:
        raise ConfigError(f"reward {name}: its time_limit is {limit:g}; a number above 0 is accepted")
    return WeightedReward(name, weight, component, limit)


def _build_judge(
    name: str, settings: JudgeSettings, policy: PolicyChoice | None
) -> "RubricJudge | GroupJudge":
    if policy is None:
        raise ConfigError(f"reward {name}: a judge needs a policy, and none is given")
    chosen = policy(settings)
    model = msgspec.json.encode(settings.policy, order="sorted").decode()
    if isinstance(settings, GroupJudgeReward):
        return GroupJudge(settings, chosen, model=model)
    assert isinstance(settings, JudgeReward)
    return RubricJudge(settings, chosen, model=model)


async def _settle(evaluations: Iterable[Any]) -> list[Any]:
    """Awaits all evaluations; returns their results, or raises the first failure in the given order."""
    results = await asyncio.gather(*evaluations, return_exceptions=True)
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return results


async def _evaluate_column(
    reward: WeightedReward, task: TaskRow, members: Sequence[ScoredAttempt]
) -> list[dict[str, float]]:
    """One reward's components for every member of a group."""
    component = reward.component
    if not isinstance(component, GroupJudge):
        return await _settle([_evaluate_one(reward, each) for each in members])
    trajectories = [each.trajectory for each in members]
    values = await _limit(reward, lambda: component.rank(task, trajectories))
    return [_read_value(reward.name, each) for each in values]


async def _evaluate_one(reward: WeightedReward, attempt: ScoredAttempt) -> dict[str, float]:
    """One reward's components for one attempt."""
    component = reward.component
    assert not isinstance(component, GroupJudge)
    return _read_value(reward.name, await _limit(reward, lambda: component.evaluate(attempt)))


async def _limit(reward: WeightedReward, start: Callable[[], Any]) -> Any:
    """Awaits the result within the time limit; an exception becomes the reward's failure. Code that ignores its
    cancellation is abandoned."""
    task = asyncio.ensure_future(_guard(reward.name, start))
    try:
        done, _ = await asyncio.wait({task}, timeout=reward.time_limit)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        raise RewardFailure(reward.name, f"gave no value within {reward.time_limit:g} s")
    return task.result()


async def _guard(name: str, start: Callable[[], Any]) -> Any:
    try:
        with calling_as(name):
            return await start()
    except NoReward as error:
        raise RewardFailure(name, str(error)) from error
    except BaseException as error:
        if is_cancellation(error):
            raise
        # Including `SystemExit` and a `CancelledError` of its own: user code must end neither the event loop nor the run.
        raise RewardFailure(name, f"raised {describe(error)}") from error


def _read_value(name: str, value: Any) -> dict[str, float]:
    """Components by name, from a number or a mapping of named numbers."""
    try:
        if not isinstance(value, Mapping):
            return {name: reward_of(value, "its value")}
        if not value:
            raise RewardFailure(name, "gave an empty mapping; a number or named numbers are accepted")
        wrong = [key for key in value if not isinstance(key, str) or not key]
        if wrong:
            raise RewardFailure(name, f"gave a mapping with the key {wrong[0]!r}; names are accepted")
        return {f"{name}.{key}": reward_of(value[key], f"its value {key!r}") for key in sorted(value)}
    except FormatError as error:
        raise RewardFailure(name, str(error)) from error
    except RewardFailure:
        raise
    except Exception as error:  # a number or mapping whose own methods raise
        raise RewardFailure(name, f"gave a value that cannot be read: {describe(error)}") from error


def _combine(rewards: Sequence[WeightedReward], parts: Sequence[Mapping[str, float]]) -> RewardResult:
    components: dict[str, float] = {}
    total = 0.0
    for reward, part in zip(rewards, parts, strict=True):
        for name, value in part.items():
            components[name] = value
            total += reward.weight * value
    try:
        return RewardResult(reward_of(total, "it"), components)
    except FormatError as error:
        raise RewardFailure("total", str(error)) from error
