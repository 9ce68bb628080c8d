"""How a training episode is played: along one path, or as a tree. Validation always plays one path."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator

from rollwright.settings import Settings


class ChainStrategyConfig(Settings):
    """One path."""

    kind: Literal["chain"] = "chain"
    """Chooses this strategy."""


class FixedBranchConfig(Settings):
    """`width` answers to every question of the first `depth` turns."""

    kind: Literal["fixed"] = "fixed"
    """Chooses this branch policy."""


class RandomBranchConfig(Settings):
    """Chains, and further answers at questions that are drawn beforehand from the first `depth` turns."""

    kind: Literal["random"]
    """Chooses this branch policy."""
    chains: PositiveInt = 2
    """Chains to begin with, each the trunk of a tree."""
    nodes: PositiveInt = 2
    """Questions of each tree that get one more answer in a round."""
    rounds: PositiveInt = 1
    """Times that questions are drawn, from all that the tree has by then."""


class UncertaintyBranchConfig(Settings):
    """`width` answers behind a decision that the model was unsure of, in the first `depth` turns; else one."""

    kind: Literal["uncertainty"]
    """Chooses this branch policy."""
    threshold: NonNegativeFloat = 1.0
    """Mean -log p of the decision's tokens, in nats, from which on it counts as unsure."""
    change: NonNegativeFloat = 0.5
    """Nats by which it may differ from the decision before it; from there on it counts as unsure too."""


class OwnBranchConfig(Settings):
    """A function of one's own: gets the node, gives the number of answers, at most `width`."""

    kind: Literal["own"]
    """Chooses this branch policy."""
    function: str
    """As `module:function`."""


BranchConfig = Annotated[
    FixedBranchConfig | RandomBranchConfig | UncertaintyBranchConfig | OwnBranchConfig,
    Field(discriminator="kind"),
]


class TreeStrategyConfig(Settings):
    """Several answers to a question, each played on with an environment of its own."""

    kind: Literal["tree"]
    """Chooses this strategy."""
    width: PositiveInt = 2
    """Most answers to one question; for `branch.kind` random see its own keys."""
    depth: PositiveInt = 2
    """Turns whose questions may get several answers, from the first one on."""
    budget: PositiveInt | None = None
    """What a whole tree may start, in `unit`. Unset: what the branch policy asks for."""
    unit: Literal["tokens", "turns", "tool_calls", "leaves"] = "leaves"
    """What the budget counts: sampled tokens, generations, steps of environments (replayed ones too), or branches."""
    branch: BranchConfig = FixedBranchConfig()
    """Which questions get several answers."""
    fork: Literal["auto", "fork", "replay", "root"] = "auto"
    """How another answer gets its environment: a copy, a new one that replays the actions, or none (only the first
    question branches). `auto`: a copy where the environment can make one, else a replay."""

    @field_validator("branch", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value


StrategyConfig = Annotated[ChainStrategyConfig | TreeStrategyConfig, Field(discriminator="kind")]
