"""The built-in tests. None depends on the order in which tests are applied.

A user-defined filter may be a function of a complete group that returns the reason to drop it, or `None`.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rollwright.aio import is_cancellation
from rollwright.errors import ConfigError, RollwrightError
from rollwright.registry import import_object, is_path
from rollwright.rollout.filters.base import Action, Filter
from rollwright.rollout.filters.settings import (
    AccuracyBandConfig,
    DuplicateConfig,
    FormatErrorConfig,
    NoTrainableTokenConfig,
    OverlongConfig,
    RepetitionConfig,
    VoidTurnConfig,
    ZeroVarianceConfig,
)
from rollwright.trajectory import FinishReason, StopReason, Trajectory, Turn, leaves, path


@dataclass(frozen=True)
class VoidTurn:
    """A turn without an effect: no readable tool call, no final answer, no action, and no end of the episode. A call that
    was executed and failed is not void."""

    settings: VoidTurnConfig | None = field(default=None, compare=False)
    name = "void_turn"

    def catches_turn(self, turn: Turn) -> bool:
        outcome = turn.outcome
        return (
            outcome is not None and outcome.action is None and not (outcome.terminated or outcome.truncated)
        )


@dataclass(frozen=True)
class WrongFormat:
    """A turn whose answer does not have the required format, or names an action that does not exist."""

    settings: FormatErrorConfig | None = field(default=None, compare=False)
    name = "format_error"

    def catches_turn(self, turn: Turn) -> bool:
        return turn.outcome is not None and not turn.outcome.valid


@dataclass(frozen=True)
class Repetition:
    """A turn whose text repeats itself: zlib makes it `ratio` times smaller or more. Short texts are not looked at, because
    they compress badly whatever they say."""

    settings: RepetitionConfig = field(default_factory=partial(RepetitionConfig, kind="repetition"))
    name = "repetition"

    def catches_turn(self, turn: Turn) -> bool:
        if len(turn.text) < self.settings.shortest:
            return False
        text = turn.text.encode()
        return len(text) / len(zlib.compress(text)) >= self.settings.ratio


@dataclass(frozen=True)
class Overlong:
    """A trajectory that was cut off: it ran out of room, or its last turn out of tokens.

    With `limit` tokens in a path and `slack` before it: a trajectory with a path that uses some of the slack. Its
    penalty is the share of the slack that each path uses, times `cost`.
    """

    settings: OverlongConfig = field(default_factory=partial(OverlongConfig, kind="overlong"))
    name = "overlong"

    def catches(self, trajectory: Trajectory) -> bool:
        if self.settings.limit is not None:
            return bool(self.penalties(trajectory))
        cut = any(trajectory.turns[leaf].finish is FinishReason.LENGTH for leaf in leaves(trajectory.turns))
        return cut or trajectory.stop is StopReason.MAX_LENGTH

    def penalties(self, trajectory: Trajectory) -> dict[int, float]:
        if self.settings.limit is None:
            return {}
        found = {}
        for leaf in leaves(trajectory.turns):
            tokens = sum(turn.completion_tokens for turn in path(trajectory.turns, leaf))
            over = (tokens - (self.settings.limit - self.settings.slack)) / max(self.settings.slack, 1)
            if over > 0:
                found[leaf] = -self.settings.cost * min(1.0, over)
        return found


@dataclass(frozen=True)
class NoTrainableToken:
    """A trajectory without a trainable token."""

    settings: NoTrainableTokenConfig | None = field(default=None, compare=False)
    name = "no_trainable_token"

    def catches(self, trajectory: Trajectory) -> bool:
        return trajectory.not_trainable is not None


@dataclass(frozen=True)
class Duplicate:
    """A member of a group that sampled exactly the tokens of an earlier one."""

    settings: DuplicateConfig | None = field(default=None, compare=False)
    name = "duplicate"

    def caught_members(self, group: Sequence[Trajectory]) -> list[int]:
        seen: set[tuple[bytes, ...]] = set()
        caught = []
        for member, trajectory in enumerate(group):
            sampled = tuple(turn.sampled_ids.tobytes() or turn.text.encode() for turn in trajectory.turns)
            if sampled in seen:
                caught.append(member)
            seen.add(sampled)
        return caught


@dataclass(frozen=True)
class ZeroVariance:
    """A group whose members all have the same score: relative to the group, none is better. Only members in the baseline
    are looked at. Groups of one, and trees whose leaves differ, are kept."""

    settings: ZeroVarianceConfig = field(default_factory=partial(ZeroVarianceConfig, kind="zero_variance"))
    name = "zero_variance"

    def catches_group(self, group: Sequence[Trajectory]) -> bool:
        scores = [score for each in group if each.in_baseline for score in leaf_scores(each)]
        return len(scores) > 1 and max(scores) - min(scores) <= self.settings.tolerance


@dataclass(frozen=True)
class AccuracyBand:
    """A group whose mean success is outside of `low` to `high`: too hard or too easy to learn from. Only members in the
    baseline are looked at."""

    settings: AccuracyBandConfig = field(default_factory=partial(AccuracyBandConfig, kind="accuracy_band"))
    name = "accuracy_band"

    def catches_group(self, group: Sequence[Trajectory]) -> bool:
        shares = [share for each in group if each.in_baseline and (share := each.success_share) is not None]
        if not shares:
            return False
        return not self.settings.low <= sum(shares) / len(shares) <= self.settings.high


def leaf_scores(trajectory: Trajectory) -> list[float]:
    """Reward and penalty of every path; of a chain, its score."""
    scores = []
    for leaf in leaves(trajectory.turns):
        outcomes = [turn.outcome for turn in path(trajectory.turns, leaf) if turn.outcome is not None]
        scores.append(
            trajectory.episode_reward + sum(outcome.reward + outcome.penalty for outcome in outcomes)
        )
    return scores or [trajectory.score]


GroupFunction = Callable[[Sequence[Trajectory]], "str | None"]


@dataclass(frozen=True)
class OwnTest:
    """Catches the groups that the function gives a reason for."""

    name: str
    function: GroupFunction

    def catches_group(self, group: Sequence[Trajectory]) -> bool:
        return self.reason(group) is not None

    def reason(self, group: Sequence[Trajectory]) -> str | None:
        try:
            return self.function(group)
        except BaseException as error:
            if is_cancellation(error):
                raise
            where = group[0].group_id if group else "without members"
            raise RollwrightError(
                f"group_filter: {self.name} raised {type(error).__name__} for group {where}: {error}"
            ) from error


def group_filter(name: str) -> Filter:
    """`zero_variance`, or a user's own function as `module:function`."""
    if name == ZeroVariance.name:
        return Filter(ZeroVariance(), Action.DROP)
    if not is_path(name):
        raise ConfigError(
            f"group_filter: unknown `{name}`; known: {ZeroVariance.name}, or module:function; see also `filters`"
        )
    try:
        chosen = import_object(name)
    except (ConfigError, ImportError) as error:
        raise ConfigError(f"group_filter: `{name}` cannot be imported: {error}") from error
    if not callable(chosen):
        raise ConfigError(f"group_filter: `{name}` is a {type(chosen).__name__}, not a function")
    return Filter(OwnTest(name, chosen), Action.DROP)
