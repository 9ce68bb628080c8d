"""Which play is left out of the loss, the batch or the baseline."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rollwright.settings import Settings

Share = Annotated[float, Field(ge=0, le=1)]
TurnAction = Literal["count", "mask", "drop", "stop"]
MemberAction = Literal["count", "mask", "drop"]
GroupAction = Literal["count", "mask", "drop"]


class FilterConfig(Settings):
    """What all filters share."""

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
    """Turns whose answer has not the format that was asked for."""

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
    """How many times smaller zlib makes the text."""
    shortest: NonNegativeInt = 500
    """Characters below which a text is not looked at."""


class OverlongConfig(FilterConfig):
    """Trajectories that were cut off for want of room."""

    kind: Literal["overlong"]
    """Chooses this filter."""
    action: Literal["count", "mask", "drop", "penalise"] = "mask"
    """`mask`: out of the loss. `drop`: replaced. `penalise`: costs up to `cost`, by how much of `slack` it uses."""
    limit: PositiveInt | None = None
    """Sampled tokens in a path; needed for `penalise`. Unset: what was cut off is caught."""
    slack: NonNegativeInt = 0
    """Tokens before `limit` in which the penalty grows from 0 to `cost`."""
    cost: NonNegativeFloat = 1.0
    """The whole penalty."""

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
    """`drop`: another group takes its place. `mask`: kept in the batch, out of the loss. `count`: only counted."""
    tolerance: NonNegativeFloat = 0.0
    """Scores this close together count as the same."""


class AccuracyBandConfig(FilterConfig):
    """Groups that are too hard or too easy."""

    kind: Literal["accuracy_band"]
    """Chooses this filter."""
    action: GroupAction = "drop"
    """As for `zero_variance`."""
    low: Share = 0.0
    """Least mean success of a group that is kept."""
    high: Share = 1.0
    """Highest mean success of a group that is kept."""


AnyFilterConfig = Annotated[
    VoidTurnConfig
    | FormatErrorConfig
    | RepetitionConfig
    | OverlongConfig
    | NoTrainableTokenConfig
    | DuplicateConfig
    | ZeroVarianceConfig
    | AccuracyBandConfig,
    Field(discriminator="kind"),
]


def by_name(value: Any) -> Any:
    """A filter that is given by its name alone has every default."""
    return (
        [{"kind": each} if isinstance(each, str) else each for each in value]
        if isinstance(value, list)
        else value
    )
