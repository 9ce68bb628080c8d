"""Settings of strategies: one path, or a tree with a branch policy; and the plug point of branch policies."""

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
)

from rollwright.registry import Registry
from rollwright.settings import Settings, choose_kind

BRANCH_POLICIES: Registry[Any] = Registry(
    "branch_policies",
    "strategy.branch",
    {
        "fixed": "rollwright.rollout.branching:FixedFanOut",
        "split": "rollwright.rollout.branching:Split",
        "keep_alive": "rollwright.rollout.branching:KeepAlive",
        "random": "rollwright.rollout.branching:RandomExpansion",
        "uncertainty": "rollwright.rollout.branching:Uncertainty",
    },
    protocol="rollwright.rollout.branching:Branching",
    key="strategy.branch",
)


class ChainStrategyConfig(Settings):
    """One path."""

    kind: Literal["chain"] = "chain"
    """Chooses this strategy."""


class FixedBranchConfig(Settings):
    """`width` answers to every question of the first `depth` turns."""

    kind: Literal["fixed"] = "fixed"
    """Chooses this branch policy."""


class SplitBranchConfig(Settings):
    """Many roots, and one wide split later: `width` answers to every question of one turn."""

    kind: Literal["split"]
    """Chooses this branch policy."""
    roots: PositiveInt = 1
    """Answers to the first question of each tree. The other members of a group are further roots, and are never merged."""
    at: NonNegativeInt = 1
    """Turn whose questions get `width` answers; 0 is the first. Late in an episode is better than early."""


class KeepAliveBranchConfig(Settings):
    """`width` answers to the first question; then, in the first `depth` turns, as many as bring the live branches of the tree
    back to `alive`, spread over all of them. For games in which most paths end early."""

    kind: Literal["keep_alive"]
    """Chooses this branch policy."""
    alive: PositiveInt = 8
    """Live branches of a tree before each turn is sampled."""


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
    """`width` answers to a question of which the model is unsure, in the first `depth` turns; else one."""

    kind: Literal["uncertainty"]
    """Chooses this branch policy."""
    of: Literal["question", "turn"] = "question"
    """What is looked at. `question`: the entropy of the distribution that the answer's first token is drawn from, which depends
    on the question alone; where the engine tells no likeliest tokens, the turn is looked at instead. `turn`: the mean -log p
    of the tokens of the turn before the question."""
    threshold: NonNegativeFloat = 1.0
    """Nats from which on the uncertainty is high."""
    change: NonNegativeFloat = 0.5
    """Difference to that of the question or turn before, in nats, from which on the uncertainty counts as high, too."""


class OwnBranchConfig(Settings):
    """A user-defined function of the node that returns the number of answers, at most `width`. With a second parameter it
    also gets all live nodes of the level. `module:function` in place of the kind does the same."""

    kind: Literal["own"]
    """Chooses this branch policy."""
    function: str
    """As `module:function`."""


BranchConfig = Annotated[
    FixedBranchConfig
    | SplitBranchConfig
    | KeepAliveBranchConfig
    | RandomBranchConfig
    | UncertaintyBranchConfig
    | OwnBranchConfig,
    Field(discriminator="kind"),
]


class TreeStrategyConfig(Settings):
    """Several answers to a question, each continued with its own environment."""

    kind: Literal["tree"]
    """Chooses this strategy."""
    width: PositiveInt = 2
    """Limit of answers to one question; `branch.kind` random has its own keys."""
    depth: PositiveInt = 2
    """Turns whose questions may get several answers, from the first one on."""
    budget: PositiveInt | None = None
    """Budget of a whole tree, in `unit`. Unset: no limit beside the branch policy."""
    unit: Literal["tokens", "turns", "tool_calls", "leaves"] = "leaves"
    """Unit of the budget: sampled tokens, generations, steps of environments (including replays), or branches."""
    branch: BranchConfig = FixedBranchConfig()
    """Branch policy: which questions get several answers."""
    fork: Literal["auto", "fork", "replay", "root"] = "auto"
    """How another answer gets its environment: a copy, a new one that replays the actions, or none (only the first
    question branches). `auto`: a copy where the environment can make one, else a replay."""

    @field_validator("branch", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return choose_kind(value, BRANCH_POLICIES, "function")


StrategyConfig = Annotated[ChainStrategyConfig | TreeStrategyConfig, Field(discriminator="kind")]
