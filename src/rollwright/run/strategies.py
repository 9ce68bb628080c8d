"""From a strategy's configuration to the strategy."""

from collections.abc import Callable

from rollwright.envs.base import Env, can_fork
from rollwright.envs.inspection import inspected_env
from rollwright.errors import ConfigError
from rollwright.rollout.branching import Branching, FixedFanOut, OwnBranching, RandomExpansion, Uncertainty
from rollwright.rollout.episode import CHAIN, Strategy
from rollwright.rollout.settings import (
    BranchConfig,
    FixedBranchConfig,
    OwnBranchConfig,
    RandomBranchConfig,
    StrategyConfig,
    TreeStrategyConfig,
    UncertaintyBranchConfig,
)
from rollwright.rollout.tree import BudgetUnit, ForkMode, TreeStrategy


def build_strategy(config: StrategyConfig) -> Strategy:
    if not isinstance(config, TreeStrategyConfig):
        return CHAIN
    return TreeStrategy(
        _branching(config.branch, config.width, config.depth),
        config.budget,
        BudgetUnit(config.unit),
        None if config.fork == "auto" else ForkMode(config.fork),
    )


def check_strategy(config: StrategyConfig, tag: str, make_env: Callable[[], Env]) -> None:
    """Whether training episodes of `tag` can be played so."""
    if not isinstance(config, TreeStrategyConfig) or config.fork != "fork":
        return
    with inspected_env(make_env) as env:
        copies_itself = can_fork(env)
    if not copies_itself:
        raise ConfigError(f"strategy.fork: `{tag}` cannot copy itself; accepted for it: auto, replay, root")


def _branching(config: BranchConfig, width: int, depth: int) -> Branching:
    match config:
        case FixedBranchConfig():
            return FixedFanOut(width, depth)
        case RandomBranchConfig():
            return RandomExpansion(config.chains, config.nodes, config.rounds, depth)
        case UncertaintyBranchConfig():
            return Uncertainty(width, depth, config.threshold, config.change)
        case OwnBranchConfig():
            return OwnBranching(config.function, width)
