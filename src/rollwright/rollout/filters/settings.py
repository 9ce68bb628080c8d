"""Settings of the filters, and the plug point of filters."""

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from rollwright.registry import Registry
from rollwright.settings import Settings, Share

FILTERS: Registry[Any] = Registry(
    "filters",
    "filter",
    {
        "void_turn": "rollwright.rollout.filters.filters:VoidTurn",
        "format_error": "rollwright.rollout.filters.filters:WrongFormat",
        "repetition": "rollwright.rollout.filters.filters:Repetition",
        "overlong": "rollwright.rollout.filters.filters:Overlong",
        "no_trainable_token": "rollwright.rollout.filters.filters:NoTrainableToken",
        "duplicate": "rollwright.rollout.filters.filters:Duplicate",
        "zero_variance": "rollwright.rollout.filters.filters:ZeroVariance",
        "accuracy_band": "rollwright.rollout.filters.filters:AccuracyBand",
    },
    protocol="rollwright.rollout.filters.base:Test",
    key="train_env_manager.filters",
)
"""A built-in filter is made with its settings below; a user-defined one with `options` as keyword arguments."""


TurnAction = Literal["count", "mask", "drop", "stop"]
MemberAction = Literal["count", "mask", "drop"]
GroupAction = Literal["count", "mask", "drop"]


class FilterConfig(Settings):
    """Settings of every filter."""

    baseline: bool = True
    """Whether a trajectory that is masked as a whole still counts in its group's baseline."""


class VoidTurnConfig(FilterConfig):
    """Turns without an action, a readable tool call or a final answer."""

    kind: Literal["void_turn"]
    """Chooses this filter."""
    action: TurnAction = "stop"
    """`count`: only counted. `mask`: the turn's tokens stay out of the loss. `drop`: the trajectory is replaced. `stop`:
    the episode ends there, and stays out of the loss as a whole."""


class FormatErrorConfig(FilterConfig):
    """Turns whose answer does not have the required format."""

    kind: Literal["format_error"]
    """Chooses this filter."""
    action: TurnAction = "count"
    """As for `void_turn`."""


class RepetitionConfig(FilterConfig):
    """Turns whose text repeats itself."""

    kind: Literal["repetition"]
    """Chooses this filter."""
    action: TurnAction = "count"
    """As for `void_turn`."""
    ratio: PositiveFloat = 10.0
    """Compression ratio of zlib from which on a text is caught."""
    shortest: NonNegativeInt = 500
    """Characters below which a text is ignored."""


class OverlongConfig(FilterConfig):
    """Trajectories that were truncated by a length limit."""

    kind: Literal["overlong"]
    """Chooses this filter."""
    action: Literal["count", "mask", "drop", "penalise"] = "mask"
    """`mask`: out of the loss. `drop`: replaced. `penalise`: penalty up to `cost`, by the used share of `slack`."""
    limit: PositiveInt | None = None
    """Limit of sampled tokens in a path; required for `penalise`. Unset: truncated trajectories are caught."""
    slack: NonNegativeInt = 0
    """Tokens before `limit` in which the penalty grows from 0 to `cost`."""
    cost: NonNegativeFloat = 1.0
    """The full penalty."""

    @model_validator(mode="after")
    def _fits(self) -> "OverlongConfig":
        if self.action == "penalise" and self.limit is None:
            raise ValueError("limit: a penalty needs the number of tokens that it ends at")
        return self


class NoTrainableTokenConfig(FilterConfig):
    """Trajectories without a token that could be trained on."""

    kind: Literal["no_trainable_token"]
    """Chooses this filter."""
    action: MemberAction = "drop"
    """`drop`: replaced. `mask`: kept in its group. `count`: only counted."""


class DuplicateConfig(FilterConfig):
    """Members of a group that sampled exactly the tokens of an earlier one."""

    kind: Literal["duplicate"]
    """Chooses this filter."""
    action: Literal["count", "mask"] = "count"
    """`mask`: out of the loss. `count`: only counted."""


class ZeroVarianceConfig(FilterConfig):
    """Groups whose members all have the same score."""

    kind: Literal["zero_variance"]
    """Chooses this filter."""
    action: GroupAction = "drop"
    """`drop`: replaced by another group. `mask`: kept in the batch, out of the loss. `count`: only counted."""
    tolerance: NonNegativeFloat = 0.0
    """Difference up to which scores count as equal."""


class AccuracyBandConfig(FilterConfig):
    """Groups that are too hard or too easy."""

    kind: Literal["accuracy_band"]
    """Chooses this filter."""
    action: GroupAction = "drop"
    """As for `zero_variance`."""
    low: Share = 0.0
    """Lowest mean success of a group that is kept."""
    high: Share = 1.0
    """Highest mean success of a group that is kept."""


class OwnFilterConfig(FilterConfig):
    """A user-defined filter; `module:name` in place of the kind does the same."""

    kind: Literal["own"]
    """Chooses this filter."""
    test: str
    """As `module:name`: a class with `name` and one of `catches_turn`, `catches`, `catches_group`, `caught_members`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    action: Literal["count", "mask", "drop", "stop", "penalise"] = "count"
    """`count`: only counted. `mask`: out of the loss. `drop`: left out, and replaced. `stop`, of turns: the episode ends
    there. `penalise`, of trajectories: the penalty is the result of `penalties`."""


AnyFilterConfig = Annotated[
    VoidTurnConfig
    | FormatErrorConfig
    | RepetitionConfig
    | OverlongConfig
    | NoTrainableTokenConfig
    | DuplicateConfig
    | ZeroVarianceConfig
    | AccuracyBandConfig
    | OwnFilterConfig,
    Field(discriminator="kind"),
]
